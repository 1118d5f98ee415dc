"""KVzip: the model repeats a prompt, and so scores its tokens."""
