"""One HTML page of a sheet, which needs nothing but itself: texts of others stay texts, and nothing is loaded."""
