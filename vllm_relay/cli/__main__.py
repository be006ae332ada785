"""``python -m vllm_relay.cli``."""

from vllm_relay.cli import main

main()
