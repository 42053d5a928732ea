"""vLLM on a CPU. It tells the log-probabilities of the 20 most likely tokens and of the prompt's own."""

from __future__ import annotations

from engine import arguments, prompt_ids, some
from vllm import LLM, SamplingParams

TOP = 20


def main() -> None:
    """Load and run the prompt."""
    asked = arguments()
    model = LLM(
        model=str(asked.model), dtype=asked.dtype, max_model_len=512, enforce_eager=True, max_num_seqs=1, seed=0
    )
    settings = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=TOP)
    done = model.generate({"prompt_token_ids": prompt_ids(asked)}, settings)[0]
    assert done.prompt_logprobs is not None
    some(
        asked,
        [
            {token: told.logprob for token, told in position.items()}
            for position in done.prompt_logprobs
            if position is not None
        ],
    )


if __name__ == "__main__":
    main()
