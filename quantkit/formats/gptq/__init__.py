"""The GPTQ checkpoint layout."""
