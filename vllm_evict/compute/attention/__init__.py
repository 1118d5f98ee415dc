"""vLLM's attention backends behind a resident view, each with what the plugin does beside its kernel."""
