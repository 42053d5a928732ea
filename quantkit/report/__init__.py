"""Reports and their presentation: records, statistics, table, plot, model card, HTML page."""
