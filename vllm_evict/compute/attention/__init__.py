"""Operations of the plugin for each attention backend of vLLM, beside the backend's kernel or in its place."""
