"""Run llama.cpp's own server, which the package xllamacpp embeds. Another interpreter can run this file alone:

PYTHON -P llama_server.py --model FILE --name NAME --host HOST --port PORT --n-ctx N --parallel N --threads N
"""

from __future__ import annotations

import argparse
import signal
import sys

MOST_CACHE = 1024  # MiB for keys and values of earlier prompts; by default llama.cpp takes up to 8 GiB


def main() -> None:
    """Serve a GGUF file until a signal ends the process."""
    parser = argparse.ArgumentParser(description="Serve a GGUF file with the llama.cpp of xllamacpp.")
    for name in ("--model", "--name", "--host"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--n-ctx", "--parallel", "--threads"):
        parser.add_argument(name, required=True, type=int)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the process also while it loads the model

    import xllamacpp

    params = xllamacpp.CommonParams()
    try:
        params.model.path = given.model
        params.model_alias = {given.name}
        params.hostnames = [given.host]
        params.port = given.port
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
        params.n_parallel = given.parallel
        params.n_ctx = given.parallel * given.n_ctx  # llama.cpp divides it among the requests
        params.cache_ram_mib = MOST_CACHE
        server = xllamacpp.Server(params)  # answers as long as this object lives
    except (AttributeError, OverflowError, RuntimeError, ValueError) as error:
        sys.exit(f"llama.cpp's server in xllamacpp {xllamacpp.__version__} does not start: {error}")
    signal.pause()
    del server


if __name__ == "__main__":
    main()
