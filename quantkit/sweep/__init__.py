"""One model in many variants, judged by one ruler."""
