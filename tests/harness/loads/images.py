"""Prompts with images, as lists of numbers. A token of an image is a negative number, the same for the whole image."""

from itertools import pairwise

import numpy as np
from engine import random_prompt
from oracle.images import END, IMAGE, START
from PIL import Image

#: Tokens of an image, whatever its size ("llava" of oracle/images.py).
SHOWN = 64


def of_pieces(pieces, words):
    """Tokens below `words` of pieces of a prompt: each has a seed and so many tokens, or none for an image."""
    made = (_shown(seed) if length is None else random_prompt(2048, seed, words)[:length] for seed, length in pieces)
    return [token for tokens in made for token in tokens]


def _shown(seed):
    """An image, with what a prompt has around it."""
    return [START, *[-1 - seed] * SHOWN, END]


def asked(prompt):
    """vLLM's prompt of such a list. If the list ends inside an image, the image is there whole."""
    once = [token for before, token in pairwise([0, *prompt]) if token >= 0 or token != before]
    request = {"prompt_token_ids": [token if token >= 0 else IMAGE for token in once]}
    if images := [token for token in once if token < 0]:
        request["multi_modal_data"] = {"image": [_image(-1 - number) for number in images]}
        request["multi_modal_uuids"] = {"image": [str(number) for number in images]}
    return request


def tokens_of(request):
    """The list of one of vLLM's requests: its prompt and answer."""
    tokens = list(request._all_token_ids)
    for feature in request.mm_features:
        first, count = feature.mm_position.offset, feature.mm_position.length
        tokens[first : first + count] = [int(feature.identifier)] * count
    return tokens


def cut(prompt, longest):
    """A prompt of at most so many tokens, which ends inside no image."""
    prompt = prompt[:longest]
    while prompt[-1] < 0:
        prompt.pop()
    return prompt


def _image(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8))
