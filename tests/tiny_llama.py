"""A tiny random llama with a few large activation channels, and the plain transformers model of any checkpoint."""

from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trials import Trial, trial_of

from quantkit.calibration.channel_scales import over_heads
from quantkit.calibration.tokens import tokens_of
from quantkit.conversion.check import prepare
from quantkit.conversion.convert import convert
from quantkit.data.texts import sample_text
from quantkit.numerics.matmul import use_products
from quantkit.records.recipe import CalibrationSpec, ConvertRecipe

ARTICLES = Path(__file__).parents[1] / "quantkit" / "data" / "sample_articles.txt"
VOCABULARY = 304
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 128, 256, 3, 4, 2
SEQUENCES, LENGTH = 16, 64
LOUD_CHANNELS = (3, 50, 100)
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
LINEARS = [f"model.layers.{i}.{name}.weight" for i in range(LAYERS) for name in SHAPES]


def trained(texts, size, special):
    """A byte-level BPE of so many tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@cache
def _tokenizer():
    articles = ARTICLES.read_text(encoding="utf-8").removesuffix(sample_text("evaluation").content)
    tokenizer = trained(articles.splitlines(), VOCABULARY, ["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


def save_tokenizer(folder):
    """A byte-level BPE trained on half of the bundled articles, which puts its BOS before a text."""
    tokenizer = Tokenizer.from_str(_tokenizer())
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def save_llama(folder, dtype=torch.bfloat16, **changes):
    """Random weights of standard deviation 0.08; the norms and `up_proj` make three channels ten times louder."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**(settings | changes)), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if name.endswith(("layernorm.weight", "up_proj.weight")):
                parameter[[channel for channel in LOUD_CHANNELS if channel < len(parameter)]] *= 10
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def calibration(length=LENGTH):
    """The bundled sample, given as a file so that nothing is fetched."""
    return CalibrationSpec(text=str(ARTICLES), sequences=SEQUENCES, length=length)


def job_for(folder, method, out=Path(), length=LENGTH, bits=None, **options):
    """A prepared and checked job and a run into `out`, as `walk` and the methods' inner functions want them."""
    text = calibration(length)
    job = prepare(ConvertRecipe(model=str(folder), method=method, bits=bits, options=options, calibration=text))
    trial = trial_of(job, out)
    trial.check()
    return trial


def converted(folder, out, method, bits="4", length=LENGTH, **options):
    return convert(str(folder), method, bits, out, calibration=calibration(length), **options)


def any_scale(weights, _hessian, _rounded, _points, heads, _shards):
    """Replaces `search_scale`: scales between 1/3 and 3 that mean nothing, equal where heads share a value head."""
    columns = weights[0].shape[1]
    scale = torch.exp(torch.rand(columns, generator=torch.Generator().manual_seed(columns)) * 2.2 - 1.1)
    return over_heads(scale, heads)


def plain_model(folder, dtype=torch.bfloat16):
    """The whole model as transformers loads it; linear layers multiply as quantkit's (test_matmul.py) do."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    use_products(model)
    return model


def calibration_ids(job):
    """The (SEQUENCES, LENGTH) ids that the job is calibrated on."""
    return torch.from_numpy(tokens_of(job.job if isinstance(job, Trial) else job).ids)


def inputs_of(model, names, ids):
    """Inputs (tokens, K) float32 that the named linear layers of a whole model see, by plain hooks."""
    seen = {}

    def note(name):
        def hook(_module, args):
            seen[name] = args[0].reshape(-1, args[0].shape[-1]).float()

        return hook

    handles = [
        model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(note(name)) for name in names
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def hessian_of(model, name, ids):
    """Mean of x x^T over all tokens, (K, K) float32."""
    x = inputs_of(model, [name], ids)[name]
    return x.T @ x / len(x)
