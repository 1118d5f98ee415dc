"""Tiny random models that see images, of transformers' classes, and what they compute under explicit masks.

Shapes: as in `oracle.model`; L counts the language model's layers with full attention.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .tiny import write_tokenizer

VOCAB, MAX_LEN = 256, 2048
TEXT = dict(
    vocab_size=VOCAB, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_LEN, initializer_range=0.15, bos_token_id=None,
    eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
IMAGE, START, END, VIDEO = 250, 251, 252, 253
WORDS = {IMAGE: "<|image_pad|>", START: "<|vision_start|>", END: "<|vision_end|>", VIDEO: "<|video_pad|>"}
#: Gemma's processor puts an image between newlines, and finds them among others.
NEWLINES = {246 + count: "\n" * (count + 1) for count in range(4)}
#: Names that Gemma 4's processor has of its own.
GEMMA4 = {VIDEO: "<|video|>", 249: "<|audio|>", 254: "<|audio_start|>", 255: "<|audio_end|>"}
NAMED = dict(boi_token=WORDS[START], eoi_token=WORDS[END], image_token=WORDS[IMAGE])
QWEN = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
SEES = dict(depth=2, hidden_size=64, num_heads=2, intermediate_size=128, out_hidden_size=128, initializer_range=0.2)
#: Kind -> text and vision configuration, and what stands beside them.
KINDS = {
    "llava": (
        dict(model_type="llama", **TEXT),
        dict(
            model_type="clip_vision_model", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, image_size=32, patch_size=4, projection_dim=64, initializer_factor=10.0,
        ),
        dict(image_token_index=IMAGE, vision_feature_layer=-2, vision_feature_select_strategy="default"),
    ),
    "qwen2_5_vl": (
        dict(TEXT, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6])),
        dict(SEES, fullatt_block_indexes=[1], window_size=56),
        QWEN,
    ),
    "qwen3_vl": (
        dict(
            TEXT,
            rope_parameters=dict(
                rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6], mrope_interleaved=True
            ),
        ),
        dict(SEES, num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
        QWEN,
    ),
    "qwen3_5": (
        dict(
            TEXT, num_attention_heads=8, num_key_value_heads=8, head_dim=256,
            layer_types=["linear_attention", "full_attention"], linear_key_head_dim=128,
            linear_value_head_dim=128, linear_num_key_heads=1, linear_num_value_heads=2, initializer_range=0.1,
            rope_parameters=dict(
                rope_type="default", rope_theta=1e4, mrope_section=[11, 11, 10], mrope_interleaved=True,
                partial_rotary_factor=0.25,
            ),
        ),
        dict(SEES, num_position_embeddings=64),
        QWEN,
    ),
}  # fmt: skip
#: The same, of models whose images attend to themselves (prefix-LM): an image of 64 tokens, in windows of 80.
PREFIX_WINDOW = 80
PREFIX_LM = {
    "gemma3": (
        dict(
            TEXT, query_pre_attn_scalar=32, sliding_window=PREFIX_WINDOW,
            layer_types=["full_attention", "sliding_attention", "full_attention"], num_hidden_layers=3,
        ),
        dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=112,
             patch_size=14),
        dict(image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END, mm_tokens_per_image=64),
    ),
    # An image of up to 70 tokens.
    "gemma4": (
        dict(
            TEXT, sliding_window=PREFIX_WINDOW, layer_types=["sliding_attention", "full_attention"] * 2,
            num_hidden_layers=4, global_head_dim=32, hidden_size_per_layer_input=0, pad_token_id=0,
            vocab_size_per_layer_input=VOCAB, use_bidirectional_attention="vision",
        ),
        dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
             head_dim=32, default_output_length=70),
        dict(image_token_id=IMAGE, boi_token_id=START, eoi_token_id=END, video_token_id=VIDEO, audio_config=None),
    ),
}  # fmt: skip
#: Kinds whose linear attention vLLM's CPU engine computes in bfloat16 alone.
BFLOAT16 = ("qwen3_5",)


def make_tiny(path: Path, kind: str, **sizes) -> Path:
    """Write a random model of a kind in `KINDS` or `PREFIX_LM`, with its processor, to a directory.

    `sizes` take the place of others in the text configuration.
    """
    text, vision, own = (KINDS | PREFIX_LM)[kind]
    text = text | sizes
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=False, **own)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        if kind in PREFIX_LM:
            torch.nn.init.normal_(projection(model.model))
    model.to(torch.bfloat16 if kind in BFLOAT16 else torch.float32).save_pretrained(path)
    if kind in ("llava", "gemma3"):  # as checkpoints name them, and vLLM reads them
        weights = load_file(path / "model.safetensors")
        weights = {name.replace("vision_tower.", "vision_tower.vision_model."): it for name, it in weights.items()}
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    write_tokenizer(path, VOCAB, MAX_LEN, WORDS | {"gemma3": NEWLINES, "gemma4": GEMMA4}.get(kind, {}))
    processor(kind, path).save_pretrained(path)
    return path


def projection(model):
    """Weights by which what a model of `PREFIX_LM` sees becomes embeddings of tokens."""
    if hasattr(model, "multi_modal_projector"):
        return model.multi_modal_projector.mm_input_projection_weight
    return model.embed_vision.embedding_projection.weight


def processor(kind, path):
    """Make a processor as checkpoints of the kind have it; images of Qwen's kinds have a token for 28 × 28 or 32 × 32
    pixels.
    """
    import transformers as hf

    named = NAMED if kind in PREFIX_LM else {}
    if kind == "gemma4":
        named = named | dict(audio_token=GEMMA4[249], boa_token=GEMMA4[254], eoa_token=GEMMA4[255])
    tokenizer = AutoTokenizer.from_pretrained(path, pad_token="t0", extra_special_tokens=named)
    if kind == "llava":
        images = hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        own = dict(patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1)
        return hf.LlavaProcessor(images, tokenizer, image_token=WORDS[IMAGE], **own)
    if kind == "gemma3":
        size = {"height": 112, "width": 112}
        return hf.Gemma3Processor(hf.Gemma3ImageProcessor(size=size), tokenizer, image_seq_length=64)
    if kind == "gemma4":
        images = hf.Gemma4ImageProcessor(max_soft_tokens=70)
        return hf.Gemma4Processor(hf.Gemma4AudioFeatureExtractor(), images, tokenizer, hf.Gemma4VideoProcessor())
    patch = 14 if kind == "qwen2_5_vl" else 16
    images = hf.Qwen2VLImageProcessor(patch_size=patch, min_pixels=16 * patch**2, max_pixels=2**20)
    if kind == "qwen2_5_vl":
        return hf.Qwen2_5_VLProcessor(images, tokenizer, hf.Qwen2VLVideoProcessor(patch_size=patch))
    return hf.Qwen3VLProcessor(images, tokenizer, hf.Qwen3VLVideoProcessor(patch_size=patch))


class DenseImages:
    """A model of `make_tiny`, computed by transformers from its first token on with each step.

    It stands in for `oracle.model.DenseLlama`. Its cache holds the tokens so far and the mask of their queries.
    `together`: whether tokens of an image attend to each other.
    """

    def __init__(self, path: Path, kind: str, together: bool = False) -> None:
        self._together = together
        ALL_ATTENTION_FUNCTIONS.register("masked-text", self._attend)  # of this model, in `forward` again
        how = {"text_config": "masked-text", "vision_config": "eager"}
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation=how)
        self.model.eval()
        self.processor = processor(kind, path)
        text = self.model.config.text_config
        self.heads, self.kv_heads = text.num_attention_heads, text.num_key_value_heads
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        self._layers = [layer for layer, its in enumerate(kinds) if its == "full_attention"]
        self.layers = len(self._layers)
        self.scale = self.model.model.language_model.layers[self._layers[0]].self_attn.scaling
        self.full, self.dtype, self.head_dim = list(range(self.layers)), torch.float32, text.head_dim
        self._prompt, self._images = torch.zeros(0, dtype=torch.long), {}
        self._masks, self._window, self._probs = [], None, {}

    def see(self, prompt, images) -> None:
        """Set the prompt, with a token for each part of an image, and its images."""
        self._prompt = torch.as_tensor(prompt, dtype=torch.long)
        self._images = dict(self.processor.image_processor(images, return_tensors="pt"))
        self._images.pop("num_soft_tokens_per_image", None)

    def new_cache(self):
        """Tokens, and what their queries see in each layer: bool [1 or H, N, N]."""
        return [torch.zeros(0, dtype=torch.long), [torch.zeros(1, 0, 0, dtype=torch.bool)] * self.layers]

    @torch.no_grad()
    def forward(self, ids, cache, mask, want_probs=False):
        """Compute as `DenseLlama.forward` does. The rest of the prompt, with its images, is computed too, and seen by
        no token before it.
        """
        tokens, before = cache
        first = len(tokens)
        tokens = torch.cat([tokens, torch.as_tensor(ids, dtype=torch.long)])
        whole = torch.cat([tokens, self._prompt[len(tokens) :]])
        number = (tokens != IMAGE).long().cumsum(0)
        image = (tokens == IMAGE) & (tokens == IMAGE)[:, None] & (number == number[:, None]) & self._together
        back = torch.arange(len(whole))[:, None] - torch.arange(len(whole))
        self._window = (back >= 0) & (back < PREFIX_WINDOW)
        self._window[: len(tokens), : len(tokens)] |= image

        def of_layer(place, queries, keys):
            new = mask
            if callable(mask):
                new = mask(place, queries[first : len(tokens)], keys[: len(tokens)])
            new = new.expand(-1 if new.dim() == 3 else 1, *new.shape[-2:]) | image[first:]
            seen = torch.zeros(max(len(new), len(before[place])), len(tokens), len(tokens), dtype=torch.bool)
            seen[:, :first, :first], seen[:, first:] = before[place], new
            return seen

        self._masks, self._of_layer = [None] * self.layers, of_layer
        ALL_ATTENTION_FUNCTIONS.register("masked-text", self._attend)
        typed = {"image_grid_thw", "image_position_ids"}.intersection(self._images)
        kinds = {"mm_token_type_ids": (whole == IMAGE).long()[None]} if typed else {}
        logits = self.model(whole[None], use_cache=False, **self._images, **kinds).logits[0, first : len(tokens)]
        cache[:] = tokens, self._masks
        probs = torch.stack([self._probs[layer] for layer in self._layers])
        return logits, probs[:, :, first : len(tokens), : len(tokens)] if want_probs else None

    def crop(self, cache, count):
        """Drop the tokens after the first `count`."""
        cache[:] = cache[0][:count], [seen[:, :count, :count] for seen in cache[1]]

    def seen_by(self, first):
        """Return what queries from the `first` on have seen: bool [Q, N]."""
        return self._masks[0][0, first:]

    def _attend(self, module, query, key, value, attention_mask, scaling, **kwargs):
        mask = self._window
        if module.layer_idx in self._layers:
            place = self._layers.index(module.layer_idx)
            seen = self._masks[place] = self._of_layer(place, query[0].transpose(0, 1), key[0].transpose(0, 1))
            mask = torch.ones_like(self._window).tril().repeat(len(seen), 1, 1)
            mask[:, : seen.shape[1], : seen.shape[2]] = seen
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ key.transpose(2, 3)) * scaling
        self._probs[module.layer_idx] = scores.masked_fill(~mask, float("-inf")).softmax(-1)[0]
        probs = self._probs[module.layer_idx][None]
        return (probs @ value).transpose(1, 2).contiguous(), probs
