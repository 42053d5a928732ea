"""What was measured, and how it is shown: records, statistics, table, plot, model card."""
