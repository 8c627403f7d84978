"""Report: tables, figures and verdicts on the paper's claims, made of committed records alone."""
