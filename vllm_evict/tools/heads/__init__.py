"""Finds the KV heads that need the whole context (retrieval heads) and those that do not (streaming heads).

    dense      a transformers model whose heads attend by class      profile   gates by attention mass on facts
    passkeys   documents with answers far from their facts           train     gates by distillation
    show       heat maps and memory                                  cli       `vllm-evict heads`

After Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads", ICLR 2025,
arXiv:2410.10819. Files of gates are in `config.gates`.
"""
