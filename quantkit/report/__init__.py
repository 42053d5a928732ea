"""Presentation of reports: statistics, tables, plots, model cards, HTML pages."""
