"""Tiny random multimodal checkpoints, as transformers publishes them: a text half, towers, and processor files."""

import json

import torch
import transformers
from tiny_architectures import DELTA, GROUPED, PER_LAYER
from tiny_llama import VOCABULARY, save_tokenizer

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**GROUPED, "vocab_size": VOCABULARY, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
# By model_type: the name of the class without its end, and settings.
MULTIMODAL = {
    "gemma3": (
        "Gemma3",
        {
            "text_config": {**TEXT, "query_pre_attn_scalar": 32, "sliding_window": 16},
            "vision_config": {**VISION, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
            "image_token_index": VOCABULARY - 1,
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {**TEXT, "model_type": "mistral", "tie_word_embeddings": False},
            "vision_config": {**VISION, "head_dim": 16, "image_size": 28, "patch_size": 14, "model_type": "pixtral"},
            "image_token_index": VOCABULARY - 1,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "text_config": {**TEXT, **DELTA, "linear_num_value_heads": 32},  # bitsandbytes takes 32 rows at a time
            "vision_config": {**QWEN_VISION, "num_position_embeddings": 16},
            "image_token_id": VOCABULARY - 1,
        },
    ),
}
LLAMA = {**TEXT, "model_type": "llama"}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
SMALL = {**VISION, "image_size": 28, "patch_size": 14}
# Further places where checkpoints have their text half, and text halves that are another causal model's.
FURTHER = {
    "llava": ("Llava", {"text_config": LLAMA, "vision_config": {**SMALL, "model_type": "clip_vision_model"}}),
    "smolvlm": ("SmolVLM", {"text_config": LLAMA, "vision_config": SMALL}),
    "qwen2_vl": (
        "Qwen2VL",
        {
            "text_config": {**TEXT, "num_attention_heads": 2, "rope_parameters": MROPE},
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
            "vision_config": {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "text_config": {**TEXT, **PER_LAYER, "global_head_dim": 32},
            "vision_config": {**VISION, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 64},
            "audio_config": None,
            "image_token_id": VOCABULARY - 1,
            "video_token_id": VOCABULARY - 2,
            "audio_token_id": VOCABULARY - 3,
        },
    ),
}
PROCESSOR = {"image_processor_type": "PixtralImageProcessor", "do_resize": True}


def save_multimodal(folder, kind):
    """A checkpoint of that model_type in bfloat16."""
    name, settings = (MULTIMODAL | FURTHER)[kind]
    config = getattr(transformers, f"{name}Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones would hide a tensor in another's place
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "PixtralProcessor"}))
    return folder
