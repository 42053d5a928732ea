"""Sources with other values than their files have: adapters merged into them, and what a file format needs."""
