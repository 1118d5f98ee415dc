"""`python -m vllm_evict` is the command `vllm-evict`."""

from .cli import main

if __name__ == "__main__":
    main()
