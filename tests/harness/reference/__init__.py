"""The scoring policies once more, token by token from their papers' formulas: no code of the plugin, no vLLM."""
