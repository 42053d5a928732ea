"""Sources with other values than their files have: adapters merged into them, rows added to the vocabulary."""
