"""lm-evaluation-harness's own task `wikitext`, its own transformers model, pages from a local file.

python harness.py MODEL PAGES.jsonl PAGES CONTEXT DTYPE
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

TASK = """
task: local_wikitext
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: !function preprocess_wikitext.wikitext_detokenizer
process_results: !function preprocess_wikitext.process_results
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: byte_perplexity}}
  - {{metric: bits_per_byte}}
"""


def main() -> None:
    """Print the task's figures."""
    model, data, pages, context, dtype = sys.argv[1:]
    own = Path(lm_eval.__file__).parent / "tasks" / "wikitext" / "preprocess_wikitext.py"
    with tempfile.TemporaryDirectory() as temp:
        (Path(temp) / "local.yaml").write_text(TASK.format(data=data), encoding="utf-8")
        (Path(temp) / own.name).write_text(own.read_text(encoding="utf-8"), encoding="utf-8")
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": model, "dtype": dtype, "max_length": int(context)},
            device="cpu",
            tasks=["local_wikitext"],
            task_manager=TaskManager(include_path=temp),
            limit=int(pages),
            batch_size=1,
            bootstrap_iters=0,
        )
    figures = found["results"]["local_wikitext"]
    names = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    print(json.dumps({name: figures[f"{name},none"] for name in names}))


if __name__ == "__main__":
    main()
