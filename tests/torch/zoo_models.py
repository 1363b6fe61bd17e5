"""Hugging Face architectures of the zoo, from tiny configs: nothing is downloaded.

Each has a kind, and says how it is built, what a batch is, and whether it generates. transformers is imported when a
model is built, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCAB = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_SURE: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_CERTAIN: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_HALVES: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    **_CERTAIN,
}
_IMAGES: dict[str, Any] = {"num_labels": 5, "image_size": 16}

Batch = Callable[[int, torch.Generator], dict[str, Any]]


def tokens(rows: int, random: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(3, VOCAB, (rows, 10), generator=random)
    return {"input_ids": ids, "labels": ids}


def images(rows: int, random: torch.Generator) -> dict[str, Any]:
    pixels = torch.randn(rows, 3, 16, 16, generator=random, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (rows,), generator=random)}


def pairs(rows: int, random: torch.Generator) -> dict[str, Any]:
    return {
        "input_ids": tokens(rows, random)["input_ids"],
        "pixel_values": images(rows, random)["pixel_values"],
        "return_loss": True,
    }


def waves(rows: int, random: torch.Generator) -> dict[str, Any]:
    heard = torch.randn(rows, 400, generator=random, dtype=torch.float64)
    return {"input_values": heard, "labels": torch.randint(1, 12, (rows, 4), generator=random)}


def spectra(rows: int, random: torch.Generator) -> dict[str, Any]:
    features = torch.randn(rows, 8, 20, generator=random, dtype=torch.float64)
    return {"input_features": features, "labels": tokens(rows, random)["labels"]}


def _build(model: str, config: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        import transformers

        made: torch.nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made

    return build


def _experts(model: str, config: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    return _build(model, config, **_GROUPED, experts_implementation="eager", num_experts_per_tok=2, **settings)


MODELS: dict[str, tuple[str, Callable[[], torch.nn.Module], Batch, bool]] = {
    "GPT-2": (
        "decoder",
        _build(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCAB,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        tokens,
        True,
    ),
    "Llama": ("decoder", _build("LlamaForCausalLM", "LlamaConfig", **_GROUPED), tokens, True),
    "Mistral": ("decoder", _build("MistralForCausalLM", "MistralConfig", **_GROUPED, head_dim=8), tokens, True),
    "Qwen2": ("decoder", _build("Qwen2ForCausalLM", "Qwen2Config", **_GROUPED), tokens, True),
    "Qwen3": ("decoder", _build("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED, head_dim=8), tokens, True),
    "Gemma 2": (
        "decoder",
        _build("Gemma2ForCausalLM", "Gemma2Config", **_GROUPED, head_dim=8, query_pre_attn_scalar=8),
        tokens,
        True,
    ),
    "Phi": ("decoder", _build("PhiForCausalLM", "PhiConfig", **_GROUPED), tokens, True),
    "OPT": (
        "decoder",
        _build(
            "OPTForCausalLM",
            "OPTConfig",
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
            dropout=0.0,
            attention_dropout=0.0,
        ),
        tokens,
        True,
    ),
    "GPT-NeoX": (
        "decoder",
        _build("GPTNeoXForCausalLM", "GPTNeoXConfig", **_SIZES, hidden_dropout=0.0, attention_dropout=0.0),
        tokens,
        True,
    ),
    "BLOOM": (
        "decoder",
        _build(
            "BloomForCausalLM",
            "BloomConfig",
            vocab_size=VOCAB,
            hidden_size=16,
            n_layer=2,
            n_head=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        tokens,
        True,
    ),
    "Falcon": (
        "decoder",
        _build(
            "FalconForCausalLM",
            "FalconConfig",
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        tokens,
        True,
    ),
    "Mixtral": (
        "mixture of experts",
        _experts("MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
        tokens,
        True,
    ),
    "Qwen2-MoE": (
        "mixture of experts",
        _experts(
            "Qwen2MoeForCausalLM",
            "Qwen2MoeConfig",
            num_experts=4,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        tokens,
        True,
    ),
    "Mamba": (
        "state space",
        _build("MambaForCausalLM", "MambaConfig", vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4),
        tokens,
        True,
    ),
    "BERT": ("encoder", _build("BertForMaskedLM", "BertConfig", **_SIZES, **_SURE), tokens, False),
    "RoBERTa": ("encoder", _build("RobertaForMaskedLM", "RobertaConfig", **_SIZES, **_SURE), tokens, False),
    "ALBERT": (
        "encoder",
        _build("AlbertForMaskedLM", "AlbertConfig", **_SIZES, **_SURE, embedding_size=8),
        tokens,
        False,
    ),
    "DistilBERT": (
        "encoder",
        _build(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            vocab_size=VOCAB,
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=32,
            max_position_embeddings=64,
            dropout=0.0,
            attention_dropout=0.0,
        ),
        tokens,
        False,
    ),
    "ELECTRA": (
        "encoder",
        _build("ElectraForMaskedLM", "ElectraConfig", **_SIZES, **_SURE, embedding_size=8),
        tokens,
        False,
    ),
    "T5": (
        "encoder-decoder",
        _build(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCAB,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        tokens,
        True,
    ),
    "BART": (
        "encoder-decoder",
        _build("BartForConditionalGeneration", "BartConfig", vocab_size=VOCAB, max_position_embeddings=64, **_HALVES),
        tokens,
        True,
    ),
    "ViT": (
        "vision",
        _build(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            patch_size=4,
            **_IMAGES,
            **_SURE,
        ),
        images,
        False,
    ),
    "ConvNeXt": (
        "vision",
        _build(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 16],
            depths=[2, 2],
            num_stages=2,
            num_labels=5,
            drop_path_rate=0.0,
        ),
        images,
        False,
    ),
    "Swin": (
        "vision",
        _build(
            "SwinForImageClassification",
            "SwinConfig",
            patch_size=2,
            embed_dim=8,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=2,
            drop_path_rate=0.0,
            **_IMAGES,
            **_SURE,
        ),
        images,
        False,
    ),
    "wav2vec 2.0": (
        "audio",
        _build(
            "Wav2Vec2ForCTC",
            "Wav2Vec2Config",
            vocab_size=12,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            conv_dim=(8, 8),
            conv_stride=(4, 4),
            conv_kernel=(8, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            mask_time_prob=0.0,
            ctc_loss_reduction="mean",
        ),
        waves,
        False,
    ),
    "Whisper": (
        "audio, encoder-decoder",
        _build(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=VOCAB,
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            begin_suppress_tokens=None,
            suppress_tokens=None,
            **_HALVES,
        ),
        spectra,
        False,
    ),
    "CLIP": (
        "two towers",
        _build(
            "CLIPModel",
            "CLIPConfig",
            text_config={**_SIZES, "projection_dim": 8, "eos_token_id": 2, "bos_token_id": 1},
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
                "projection_dim": 8,
            },
            projection_dim=8,
        ),
        pairs,
        False,
    ),
}
