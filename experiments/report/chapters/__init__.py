"""Chapters of the report: tables, figures and claims of each experiment, from its records."""
