"""Models, cards and loads in numbers: parameters, blocks of a card's KV pool, blocks of a share of a load."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from models import Shape

GIB = 2**30
#: Of 16 bits a parameter, and a key or value.
ITEMSIZE = 2
LLAMA_2_7B = Shape(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, intermediate=11008, vocab=32000)
LLAMA_3_1_8B = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)
#: A card that is sold as one of 24 GB, vLLM's default share of it, and what is left of that share to activations, CUDA
#: graphs and libraries: a chunk of 2,048 tokens takes about 0.2 GiB of it in a model of 7 billion parameters.
CARD, UTILIZATION, ACTIVATIONS = 24 * GIB, 0.9, 1 * GIB


def parameters(shape: Shape) -> int:
    """Of a Llama with untied embeddings and output layer."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (2 * queries + 2 * keys)
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return 2 * shape.vocab * shape.hidden + shape.layers * layer + shape.hidden


def card_blocks(shape: Shape, block_size: int) -> int:
    """KV blocks, vLLM's null block among them, that a 24 GB card has beside the model's weights in 16 bits."""
    free = int(CARD * UTILIZATION) - parameters(shape) * ITEMSIZE - ACTIVATIONS
    return max(free, 0) // (block_size * shape.kv_bytes_per_token(ITEMSIZE))


def load_blocks(requests: int, tokens: int, block_size: int, share: float = 1.0) -> int:
    """KV blocks for that share of the tokens of all requests, and vLLM's null block."""
    return int(requests * -(-tokens // block_size) * share) + 1
