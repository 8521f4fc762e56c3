# SPDX-License-Identifier: Apache-2.0
"""Tiny models of diffusers' transformer classes for images, and their inputs.

Each has two blocks and, where its class admits it, an odd number of tokens and a batch of two.
"""

from __future__ import annotations

import torch

from .diffusion_case import CHANNELS, HEADS, ROTARY, SD, Case, Draw, Inputs, grid, mask, steps

FLUX = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 8, **HEADS}
HIDREAM = {
    "patch_size": 2,
    "num_layers": 1,
    "num_single_layers": 1,
    "caption_channels": (8, 4),
    **CHANNELS,
    **HEADS,
}
HIDREAM |= {"text_emb_dim": 8, "axes_dims_rope": (4, 4, 4), "max_resolution": (8, 8), "llama_layers": (0, 1)}
HIDREAM |= {"num_routed_experts": 3, "num_activated_experts": 2}
SIZES = {"original_size": (80, 144), "target_size": (80, 144), "crop_coords": (0, 0)}


def sizes(batch: int = 2) -> Inputs:
    return {name: torch.tensor([size] * batch) for name, size in SIZES.items()}


def ideogram(draw: Draw) -> Inputs:
    """7 tokens of text and 45 of an image in one sequence."""
    of_text = torch.arange(52) < 7
    places = torch.zeros(2, 52, 3, dtype=torch.int64)
    places[:, :7] = torch.arange(7)[:, None]
    places[:, 7:] = grid(5, 9).long() + 65536
    return {
        "hidden_states": draw(2, 52, 4) * ~of_text[:, None],
        "encoder_hidden_states": draw(2, 52, 8) * of_text[:, None],
        "timestep": torch.tensor([0.5, 0.25], dtype=torch.float64),
        "position_ids": places,
        "segment_ids": torch.ones(2, 52, dtype=torch.int64),
        "indicator": torch.where(of_text, 3, 2).expand(2, 52),
    }


def krea(draw: Draw) -> Inputs:
    places = torch.cat([torch.zeros(7, 3, dtype=torch.float64), grid(5, 9)])
    return draw.tokens() | {
        "encoder_hidden_states": draw(2, 7, 3, 8),
        "position_ids": places,
        "encoder_attention_mask": mask(7, 5),
    }


def qwen21(draw: Draw) -> Inputs:
    """5 tokens of text, and an image of 6 x 6 tokens that takes 9 places among them."""
    return (
        draw.tokens(count=36, batch=1)
        | draw.text(length=5, batch=1)
        | {
            "img_shapes": [[(1, 6, 6)]],
            "img_mask": torch.arange(14)[None] >= 5,
        }
    )


def omnigen(draw: Draw) -> Inputs:
    """24 tokens of text, of which 10 are an input image's, and 1 of the time, before 45 of the image."""
    return draw.image() | {
        "timestep": torch.tensor([0.25, 0.5], dtype=torch.float64),
        "input_ids": draw.ids(10, 2, 24),
        "input_img_latents": [draw(1, 4, 4, 10)],
        "input_image_sizes": {0: [[3, 13]]},
        "attention_mask": torch.ones(70, 70).tril().double().expand(2, 70, 70).contiguous(),
        "position_ids": torch.arange(70).expand(2, 70),
    }


def z_image(draw: Draw) -> Inputs:
    return {
        "x": [draw(4, 1, 10, 18), draw(4, 1, 6, 10)],
        "t": torch.tensor([0.25, 0.5], dtype=torch.float64),
        "cap_feats": [draw(7, 8), draw(5, 8)],
    }


def hunyuan_dit(draw: Draw) -> Inputs:
    return (
        draw.image()
        | draw.text(length=4)
        | {
            "timestep": steps().double(),
            "text_embedding_mask": mask(4, 2, length=4),
            "encoder_hidden_states_t5": draw(2, 3, 8),
            "text_embedding_mask_t5": mask(3, 2, length=3),
            "image_meta_size": torch.tensor([[80.0, 144, 80, 144, 0, 0]] * 2, dtype=torch.float64),
            "style": torch.zeros(2, dtype=torch.int64),
            "image_rotary_emb": (draw(45, 12), draw(45, 12)),
        }
    )


def hidream(draw: Draw) -> Inputs:
    image = draw.image(height=8, width=8)
    return (
        {"timesteps": image.pop("timestep")}
        | image
        | {
            "encoder_hidden_states_t5": draw(2, 7, 8),
            "encoder_hidden_states_llama3": draw(2, 2, 7, 4),
            "pooled_embeds": draw(2, 8),
        }
    )


def hunyuan_image(draw: Draw) -> Inputs:
    return (
        draw.image()
        | draw.text()
        | {
            "timestep": steps().double(),
            "encoder_attention_mask": mask(7, 5),
            "encoder_hidden_states_2": draw(2, 3, 8),
            "encoder_attention_mask_2": mask(2, 3, length=3),
        }
    )


IMAGES: dict[str, Case] = {
    "AuraFlowTransformer2DModel": Case(
        {
            "sample_size": 18,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "joint_attention_dim": 8,
            **HEADS,
        }
        | {"caption_projection_dim": 36, "pos_embed_max_size": 81, **CHANNELS},
        lambda draw: draw.image() | draw.text(),
    ),
    "BriaTransformer2DModel": Case(FLUX | ROTARY, Draw.flux),
    "BriaFiboTransformer2DModel": Case(
        FLUX | ROTARY | {"text_encoder_dim": 4},
        lambda draw: draw.flux(text_encoder_layers=[draw(2, 7, 4), draw(2, 7, 4)]),
    ),
    "BriaFibo2Transformer2DModel": Case(
        {"in_channels": 4, "dim": 36, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 3, "cap_feat_dim": 8}
        | {"injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 3, "gist_step": 2}
        | {"max_num_gist_tokens": 7, "gist_min_text_len": 4, "gist_max_text_len": 8, "axes_dims": (4, 4, 4)}
        | {"axes_lens": (64, 64, 64)},
        lambda draw: (
            draw.image()
            | {"encoder_hidden_states": draw(2, 2, 7, 8), "encoder_attention_mask": mask(7, 4)}
            | {
                "context_latents": [draw(2, 4, 6, 6)],
                "timestep": torch.tensor([0.1, 0.5], dtype=torch.float64),
            }
        ),
    ),
    "ChromaTransformer2DModel": Case(
        FLUX
        | ROTARY
        | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        Draw.flux,
    ),
    "CogView3PlusTransformer2DModel": Case(
        {"num_layers": 2, "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4, **CHANNELS, **HEADS}
        | {"pos_embed_max_size": 10, "sample_size": 18},
        lambda draw: draw.image() | draw.text() | sizes(),
    ),
    "CogView4Transformer2DModel": Case(
        {"num_layers": 2, "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4, **CHANNELS, **HEADS}
        | {"rope_axes_dim": (32, 32)},
        lambda draw: draw.image() | draw.text() | sizes(),
    ),
    "DiTTransformer2DModel": Case(
        {
            "num_layers": 2,
            "num_embeds_ada_norm": 8,
            "sample_size": 10,
            "norm_num_groups": 1,
            **CHANNELS,
            **HEADS,
        },
        lambda draw: draw.image(height=10, width=10) | {"class_labels": torch.tensor([1, 3])},
    ),
    "DreamLiteTransformer2DModel": Case(
        SD | {"in_channels": 4, "cross_attention_dim": 8, "qk_norm": "rms_norm"},
        lambda draw: draw.image(height=5, width=9) | draw.text(),
    ),
    "ErnieImageTransformer2DModel": Case(
        {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_layers": 2,
            "ffn_hidden_size": 24,
            "text_in_dim": 8,
        }
        | {"rope_axes_dim": (4, 4, 4), **CHANNELS},
        lambda draw: (
            draw.image(height=5, width=9)
            | {"text_bth": draw(2, 7, 8), "text_lens": torch.tensor([7, 5]), "timestep": steps().double()}
        ),
    ),
    "FluxTransformer2DModel": Case(
        FLUX | ROTARY | {"pooled_projection_dim": 8}, lambda draw: draw.flux(pooled_projections=draw(2, 8))
    ),
    "Flux2Transformer2DModel": Case(
        FLUX | {"axes_dims_rope": (4, 4, 2, 2), "timestep_guidance_channels": 8},
        lambda draw: draw.flux(4, guidance=torch.tensor([1.0, 2.0], dtype=torch.float64)),
    ),
    "Flux3Transformer2DModel": Case(
        FLUX | {"axes_dims_rope": (4, 4, 2, 2), "cond_in_channels": 4, "timestep_channels": 8},
        lambda draw: draw.flux(4, image_cond_hidden_states=draw(2, 15, 4), image_cond_ids=grid(3, 5, 4)),
    ),
    "GlmImageTransformer2DModel": Case(
        {"num_layers": 2, "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4, **CHANNELS, **HEADS}
        | {"prior_vq_quantizer_codebook_size": 16},
        lambda draw: (
            draw.image()
            | draw.text()
            | {"prior_token_id": draw.ids(16, 2, 45), "prior_token_drop": torch.tensor([False, True])}
            | {"target_size": sizes()["target_size"].double(), "crop_coords": sizes()["crop_coords"].double()}
        ),
    ),
    "HiDreamImageTransformer2DModel": Case(HIDREAM, hidream),
    "HiDreamImageTransformer2DModel (inference)": Case(HIDREAM | {"force_inference_output": True}, hidream),
    "HunyuanDiT2DModel": Case(
        {
            "num_attention_heads": 3,
            "attention_head_dim": 12,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 10,
        }
        | {"hidden_size": 36, "num_layers": 2, "cross_attention_dim": 8, "cross_attention_dim_t5": 8}
        | {"pooled_projection_dim": 4, "text_len": 4, "text_len_t5": 3},
        hunyuan_dit,
    ),
    "HunyuanImageTransformer2DModel": Case(
        {
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": (2, 2),
            **CHANNELS,
            **HEADS,
        }
        | {"text_embed_dim": 8, "text_embed_2_dim": 8, "rope_axes_dim": (6, 6)},
        hunyuan_image,
    ),
    "Ideogram4Transformer2DModel": Case(
        {
            "in_channels": 4,
            "num_layers": 2,
            "intermediate_size": 24,
            "adaln_dim": 8,
            "llm_features_dim": 8,
            **HEADS,
        }
        | {"mrope_section": (2, 2, 2)},
        ideogram,
    ),
    "Krea2Transformer2DModel": Case(
        {
            "in_channels": 4,
            "num_layers": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 24,
            **HEADS,
            **ROTARY,
        }
        | {"timestep_embed_dim": 8, "text_hidden_dim": 8, "num_text_layers": 3, "text_num_attention_heads": 2}
        | {"text_num_key_value_heads": 1, "text_intermediate_size": 16, "num_layerwise_text_blocks": 1}
        | {"num_refiner_text_blocks": 1},
        krea,
    ),
    "LongCatImageTransformer2DModel": Case(
        FLUX | ROTARY | {"pooled_projection_dim": 8}, lambda draw: draw.flux(guidance=torch.ones(2))
    ),
    "Lumina2Transformer2DModel": Case(
        {"sample_size": 16, "in_channels": 4, "hidden_size": 36, "num_layers": 2, "num_refiner_layers": 1}
        | {"num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (4, 4, 4)}
        | {"axes_lens": (64, 64, 64), "cap_feat_dim": 8},
        lambda draw: draw.image() | draw.text() | {"encoder_attention_mask": mask(7, 5)},
    ),
    "LuminaNextDiT2DModel": Case(
        {"sample_size": 18, "in_channels": 4, "hidden_size": 36, "num_layers": 2, "num_attention_heads": 3}
        | {"num_kv_heads": 1, "multiple_of": 2, "cross_attention_dim": 8, "learn_sigma": False},
        lambda draw: (
            draw.image()
            | draw.text()
            | {"encoder_mask": mask(7, 5), "image_rotary_emb": draw(16, 16, 6), "cross_attention_kwargs": {}}
        ),
    ),
    "NucleusMoEImageTransformer2DModel": Case(
        {"in_channels": 16, "out_channels": 4, "num_layers": 3, "joint_attention_dim": 8, **HEADS, **ROTARY}
        | {"dense_moe_strategy": "leave_first_block_dense", "num_experts": 3, "moe_intermediate_dim": 16}
        | {"capacity_factors": [2.0] * 3},
        lambda draw: (
            draw.tokens(16)
            | draw.text()
            | {"encoder_hidden_states_mask": mask(7, 5).long(), "img_shapes": [(1, 5, 9)] * 2}
        ),
    ),
    "OmniGenTransformer2DModel": Case(
        {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 24}
        | {"num_layers": 2, "pad_token_id": 0, "vocab_size": 16, "in_channels": 4, "time_step_dim": 4}
        | {"rope_scaling": {"long_factor": [1.0] * 6, "short_factor": [1.0] * 6}, "pos_embed_max_size": 16},
        omnigen,
    ),
    "OvisImageTransformer2DModel": Case(FLUX | ROTARY | {"out_channels": 4}, Draw.flux),
    "PixArtTransformer2DModel": Case(
        {
            "sample_size": 18,
            "num_layers": 2,
            "cross_attention_dim": 36,
            "caption_channels": 8,
            **CHANNELS,
            **HEADS,
        }
        | {"use_additional_conditions": False},
        lambda draw: (
            draw.image()
            | draw.text()
            | {
                "added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
                "encoder_attention_mask": mask(7, 5),
            }
        ),
    ),
    "PriorTransformer": Case(
        {"num_layers": 2, "embedding_dim": 8, "num_embeddings": 41, **HEADS},
        lambda draw: (
            {"hidden_states": draw(2, 8), "timestep": 2, "proj_embedding": draw(2, 8)}
            | draw.text(length=41)
            | {"attention_mask": mask(41, 30, length=41)}
        ),
    ),
    "PRXTransformer2DModel": Case(
        {
            "in_channels": 4,
            "context_in_dim": 8,
            "hidden_size": 36,
            "num_heads": 3,
            "depth": 2,
            "axes_dim": (6, 6),
        },
        lambda draw: (
            draw.image()
            | draw.text()
            | {"timestep": torch.tensor([0.25, 0.5], dtype=torch.float64), "attention_mask": mask(7, 5)}
        ),
    ),
    "QwenImageTransformer2DModel": Case(
        {"in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 8, **HEADS, **ROTARY},
        lambda draw: (
            draw.tokens(16)
            | draw.text()
            | {"encoder_hidden_states_mask": mask(7, 5).long(), "img_shapes": [[(1, 5, 9)]] * 2}
        ),
    ),
    "QwenImage21Transformer2DModel": Case(
        {"num_layers": 2, "context_in_dim": 8, **CHANNELS, **HEADS, **ROTARY}, qwen21
    ),
    "SanaTransformer2DModel": Case(
        {"num_layers": 2, "num_cross_attention_heads": 3, "cross_attention_head_dim": 12, **CHANNELS, **HEADS}
        | {"cross_attention_dim": 36, "caption_channels": 8, "sample_size": 9},
        lambda draw: draw.image(height=5, width=9) | draw.text(),
    ),
    "SD3Transformer2DModel": Case(
        {
            "sample_size": 18,
            "num_layers": 2,
            "joint_attention_dim": 8,
            "caption_projection_dim": 36,
            **CHANNELS,
        }
        | {"pooled_projection_dim": 8, "pos_embed_max_size": 10, "dual_attention_layers": (0,), **HEADS},
        lambda draw: draw.image() | draw.text() | {"pooled_projections": draw(2, 8)},
    ),
    "Transformer2DModel": Case(
        SD | {"in_channels": 4, "cross_attention_dim": 8},
        lambda draw: (
            {"hidden_states": draw(2, 4, 5, 9)} | draw.text() | {"encoder_attention_mask": mask(7, 5)}
        ),
    ),
    "ZImageTransformer2DModel": Case(
        {"in_channels": 4, "dim": 36, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 3, "n_kv_heads": 3}
        | {"cap_feat_dim": 8, "axes_dims": (4, 4, 4), "axes_lens": (256, 32, 32)},
        z_image,
    ),
}
