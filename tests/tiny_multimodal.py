"""Tiny random multimodal checkpoints, as transformers publishes them: a text half, towers, and processor files."""

import json
from copy import deepcopy

import torch
import transformers
from tiny_architectures import DELTA, GROUPED, PER_LAYER
from tiny_llama import VOCABULARY, save_tokenizer

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**GROUPED, "vocab_size": VOCABULARY, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {**VISION, "image_size": 28, "patch_size": 14}
PIXTRAL = {**SMALL, "head_dim": 16, "model_type": "pixtral"}
QWEN2_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
QWEN_SIZES = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
QWEN_VISION = {**QWEN_SIZES, "num_position_embeddings": 16}
QWEN3_VISION = {**QWEN_VISION, "deepstack_visual_indexes": [1]}
GEMMA4_VISION = {**VISION, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
LLAMA = {**TEXT, "model_type": "llama"}
MISTRAL = {**TEXT, "model_type": "mistral", "tie_word_embeddings": False}
QWEN2_TEXT = {**TEXT, "num_attention_heads": 2, "rope_parameters": MROPE}
QWEN3_TEXT = {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
QWEN3_5_TEXT = {**TEXT, **DELTA, "linear_num_value_heads": 32}  # bitsandbytes takes 32 rows at a time
GEMMA3_TEXT = {**TEXT, "query_pre_attn_scalar": 32, "sliding_window": 16}
GEMMA4_TEXT = {**TEXT, **PER_LAYER, "global_head_dim": 32}
IMAGE, VIDEO, AUDIO = VOCABULARY - 1, VOCABULARY - 2, VOCABULARY - 3
GEMMA4_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": AUDIO}


def halves(text, vision):
    return {"text_config": text, "vision_config": vision}


# By model_type: the name of the class without its end, and settings.
MULTIMODAL = {
    "gemma3": ("Gemma3", {**halves(GEMMA3_TEXT, SMALL), "mm_tokens_per_image": 4, "image_token_index": IMAGE}),
    "mistral3": ("Mistral3", {**halves(MISTRAL, PIXTRAL), "image_token_index": IMAGE, "tie_word_embeddings": False}),
    "qwen3_5": ("Qwen3_5", {**halves(QWEN3_5_TEXT, QWEN_VISION), "image_token_id": IMAGE}),
}
# Further places where checkpoints have their text half, and text halves that are another causal model's.
FURTHER = {
    "llava": ("Llava", halves(LLAMA, {**SMALL, "model_type": "clip_vision_model"})),
    "smolvlm": ("SmolVLM", halves(LLAMA, SMALL)),
    "qwen2_vl": ("Qwen2VL", halves(QWEN2_TEXT, QWEN2_VISION)),
    "qwen3_vl": ("Qwen3VL", halves(QWEN3_TEXT, QWEN3_VISION)),
    "gemma4": ("Gemma4", {**halves(GEMMA4_TEXT, GEMMA4_VISION), **GEMMA4_IDS, "audio_config": None}),
}
PROCESSOR = {"image_processor_type": "PixtralImageProcessor", "do_resize": True}


def save_multimodal(folder, kind):
    """A checkpoint of that model_type in bfloat16."""
    name, settings = (MULTIMODAL | FURTHER)[kind]
    config = getattr(transformers, f"{name}Config")(**deepcopy(settings))  # which transformers changes
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
