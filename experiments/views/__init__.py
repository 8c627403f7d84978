"""What records show: tables, figures and verdicts of each experiment."""
