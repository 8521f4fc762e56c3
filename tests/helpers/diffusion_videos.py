# SPDX-License-Identifier: Apache-2.0
"""Tiny models of diffusers' transformer classes for videos, and their inputs."""

from __future__ import annotations

import torch

from .diffusion_case import CHANNELS, HEADS, SD, Case, Draw, Inputs, mask, steps

WAN = {
    "text_dim": 8,
    "freq_dim": 8,
    "ffn_dim": 24,
    "num_layers": 2,
    "rope_max_seq_len": 32,
    **CHANNELS,
    **HEADS,
}
COGVIDEO = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "time_embed_dim": 4,
    "text_embed_dim": 8,
    **CHANNELS,
}
COGVIDEO |= {
    "num_layers": 2,
    "sample_width": 10,
    "sample_height": 6,
    "sample_frames": 9,
    "max_text_seq_length": 7,
}
HUNYUAN = {
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": 8,
    **CHANNELS,
    **HEADS,
}
HUNYUAN |= {"pooled_projection_dim": 8, "rope_axes_dim": (4, 4, 4), "patch_size": 2}
LTX2 = {"cross_attention_dim": 36, "audio_in_channels": 4, "audio_out_channels": 4, **CHANNELS, **HEADS}
LTX2 |= {"audio_num_attention_heads": 3, "audio_attention_head_dim": 4, "audio_cross_attention_dim": 12}
LTX2 |= {"num_layers": 2, "caption_channels": 8}
KANDINSKY = {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 8, "in_text_dim2": 8, "time_dim": 8}
KANDINSKY |= {
    "model_dim": 36,
    "ff_dim": 24,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 4, 4),
}


def wan(draw: Draw) -> Inputs:
    return draw.video() | draw.text()


def hunyuan(draw: Draw) -> Inputs:
    pooled = {"pooled_projections": draw(2, 8), "guidance": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    return draw.video() | draw.text() | {"encoder_attention_mask": mask(7, 5)} | pooled


def framepack(draw: Draw) -> Inputs:
    """45 tokens of the video after 23 of its history."""
    history = {"latents_clean": draw(2, 4, 1, 6, 10), "indices_latents_clean": torch.arange(1)}
    history |= {"latents_history_2x": draw(2, 4, 2, 6, 10), "indices_latents_history_2x": torch.arange(2)}
    history |= {"latents_history_4x": draw(2, 4, 4, 6, 10), "indices_latents_history_4x": torch.arange(4)}
    of_image = {"image_embeds": draw(2, 3, 8), "indices_latents": torch.arange(7, 10)}
    return hunyuan(draw) | history | of_image


def helios(draw: Draw) -> Inputs:
    history = {}
    for name, frames in (("short", 1), ("mid", 2), ("long", 4)):
        history[f"indices_latents_history_{name}"] = torch.arange(frames).expand(2, frames)
        history[f"latents_history_{name}"] = draw(2, 4, frames, 6, 10)
    return wan(draw) | history | {"indices_hidden_states": torch.arange(7, 10).expand(2, 3)}


def anyflow(draw: Draw) -> Inputs:
    times = torch.tensor([[500.0, 500, 400], [300, 200, 100]], dtype=torch.float64)
    return draw.text() | {
        "hidden_states": draw(2, 3, 4, 6, 10),
        "timestep": times,
        "r_timestep": times / 2,
    }


def anyflow_far(draw: Draw) -> Inputs:
    times = torch.tensor([[500.0, 500, 400, 400]] * 2)
    return draw.text() | {
        "hidden_states": draw(2, 4, 4, 8, 8),
        "timestep": times,
        "r_timestep": times / 2,
        "chunk_partition": [2, 2],
    }


def wan_animate(draw: Draw) -> Inputs:
    """3 frames of latents, 2 of poses and 5 of faces."""
    image = draw.video(channels=12) | draw.text()
    return image | {
        "encoder_hidden_states_image": draw(2, 3, 8),
        "pose_hidden_states": draw(2, 4, 2, 6, 10),
        "face_pixel_values": draw(2, 3, 5, 16, 16),
    }


def wan_animate_2(draw: Draw) -> Inputs:
    """The pass over the reference, which fills the cache."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return {
        "hidden_states": [draw(4, 3, 6, 10)],
        "timestep": torch.tensor([1.0], dtype=torch.float64),
        "encoder_hidden_states": [draw(5, 8)],
        "condition_latents": [draw(8, 3, 6, 10)],
        "encoder_hidden_states_image": draw(1, 3, 1280),
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": 45,
        "offset_grid_sizes": torch.tensor([[3, 3, 5]]),
    }


def ltx(draw: Draw) -> Inputs:
    size = {"num_frames": 3, "height": 3, "width": 5}
    return draw.tokens() | draw.text() | {"timestep": steps(), "encoder_attention_mask": mask(7, 5)} | size


def ltx2(draw: Draw) -> Inputs:
    audio = {
        "audio_hidden_states": draw(2, 9, 4),
        "audio_encoder_hidden_states": draw(2, 7, 8),
        "audio_num_frames": 9,
    }
    return ltx(draw) | audio | {"timestep": steps().double(), "fps": 25.0}


def sana_wm_refiner(draw: Draw) -> Inputs:
    angles = draw(1, 45, 36)
    return (
        draw.tokens()
        | draw.text()
        | {
            "timestep": steps().double()[:, None],
            "video_rotary_emb": (angles.cos(), angles.sin()),
            "encoder_attention_mask": mask(7, 5),
        }
    )


def minimax_h3(draw: Draw) -> Inputs:
    """5 tokens of text, 6 of audio and 34 of video in one sequence."""
    at = torch.arange(45)
    places = torch.stack([at, at % 4, at % 2], 1).double()
    return {
        "hidden_states": draw(2, 34, 16),
        "audio_hidden_states": draw(2, 6, 6),
        "encoder_hidden_states": draw(2, 5, 8),
        "timestep": torch.tensor([0.7, 0.3], dtype=torch.float64),
        "timestep_indices": ((at >= 5) & (at < 11)).long(),
        "token_tags": torch.where(at < 5, 1, torch.where(at < 11, 2, 0)),
        "position_ids": places,
        "video_indices": at[11:],
        "audio_indices": at[5:11],
        "text_indices": at[:5],
    }


def cosmos3(draw: Draw) -> Inputs:
    """7 tokens of text before 45 of a video, all of whose frames are noisy."""
    return {
        "input_ids": draw.ids(16, 7),
        "text_indexes": torch.arange(7),
        "position_ids": torch.arange(52).expand(3, 52),
        "und_len": 7,
        "sequence_length": 52,
        "vision_tokens": [draw(1, 4, 3, 3, 5)],
        "vision_token_shapes": [(3, 3, 5)],
        "vision_sequence_indexes": torch.arange(7, 52),
        "vision_mse_loss_indexes": torch.arange(7, 52),
        "vision_timesteps": torch.full((45,), 500.0),
        "vision_noisy_frame_indexes": [torch.arange(3)],
    }


def kandinsky(draw: Draw) -> Inputs:
    return {
        "hidden_states": draw(2, 3, 6, 10, 4),
        "encoder_hidden_states": draw(2, 7, 8),
        "timestep": steps().double(),
        "pooled_projections": draw(2, 8),
        "visual_rope_pos": tuple(torch.arange(size) for size in (3, 3, 5)),
    }


def kandinsky6(draw: Draw) -> Inputs:
    return kandinsky(draw) | {"audio_hidden_states": draw(2, 9, 4), "encoder_attention_mask": mask(7, 5)}


VIDEOS: dict[str, Case] = {
    "AllegroTransformer3DModel": Case(
        {
            "num_layers": 2,
            "cross_attention_dim": 36,
            "sample_height": 6,
            "sample_width": 10,
            **CHANNELS,
            **HEADS,
        }
        | {"sample_frames": 3, "caption_channels": 8},
        lambda draw: wan(draw) | {"encoder_attention_mask": mask(7, 5)},
    ),
    "AnyFlowTransformer3DModel": Case(WAN, anyflow),
    "AnyFlowFARTransformer3DModel": Case(
        WAN | {"num_attention_heads": 2, "full_chunk_limit": 3, "chunk_partition": (2, 2)},
        anyflow_far,
        has_backward=False,
    ),
    "ChronoEditTransformer3DModel": Case(WAN, wan),
    "CogVideoXTransformer3DModel": Case(
        COGVIDEO, lambda draw: draw.text() | {"hidden_states": draw(2, 3, 4, 6, 10), "timestep": steps()}
    ),
    "ConsisIDTransformer3DModel": Case(
        COGVIDEO
        | {
            "cross_attn_interval": 1,
            "is_train_face": True,
            "cross_attn_dim_head": 4,
            "cross_attn_num_heads": 2,
        }
        | {"LFE_id_dim": 4, "LFE_vit_dim": 4, "LFE_depth": 5, "LFE_dim_head": 4, "LFE_num_heads": 2}
        | {
            "LFE_num_id_token": 1,
            "LFE_num_querie": 2,
            "LFE_output_dim": 32,
            "LFE_ff_mult": 1,
            "LFE_num_scale": 1,
        },
        lambda draw: (
            draw.text()
            | {"hidden_states": draw(2, 3, 4, 6, 10), "timestep": steps()}
            | {"id_vit_hidden": [draw(2, 3, 4)], "id_cond": draw(2, 4)}
        ),
    ),
    "CosmosTransformer3DModel": Case(
        {"num_layers": 2, "mlp_ratio": 2, "text_embed_dim": 8, "adaln_lora_dim": 4, "max_size": (4, 16, 16)}
        | {"extra_pos_embed_type": "learnable", "concat_padding_mask": False, **CHANNELS, **HEADS},
        lambda draw: wan(draw) | {"fps": 30},
        dtype=torch.float32,
        in_double=False,
    ),
    "Cosmos3OmniTransformer": Case(
        {
            "head_dim": 12,
            "hidden_size": 36,
            "intermediate_size": 24,
            "latent_channel": 4,
            "latent_patch_size": 1,
        }
        | {"num_attention_heads": 3, "num_hidden_layers": 2, "num_key_value_heads": 1, "patch_latent_dim": 4}
        | {"rope_axes_dim": [2, 2, 2], "vocab_size": 16},
        cosmos3,
    ),
    "EasyAnimateTransformer3DModel": Case(
        {"num_layers": 2, "mmdit_layers": 1, "patch_size": 2, "sample_height": 60, "sample_width": 90}
        | {
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "text_embed_dim": 8,
            "time_embed_dim": 8,
            **CHANNELS,
        },
        wan,
    ),
    "HeliosTransformer3DModel": Case(
        {
            "text_dim": 8,
            "freq_dim": 8,
            "ffn_dim": 24,
            "num_layers": 2,
            "rope_dim": (4, 4, 4),
            **CHANNELS,
            **HEADS,
        },
        helios,
    ),
    "HunyuanVideoTransformer3DModel": Case(HUNYUAN, hunyuan),
    "HunyuanVideo15Transformer3DModel": Case(
        {
            "num_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": 8,
            "text_embed_2_dim": 8,
            **CHANNELS,
            **HEADS,
        }
        | {"image_embed_dim": 8, "rope_axes_dim": (4, 4, 4), "target_size": 16, "task_type": "i2v"},
        lambda draw: (
            draw.video(height=3, width=5)
            | draw.text()
            | {"encoder_attention_mask": mask(7, 5), "encoder_hidden_states_2": draw(2, 3, 8)}
            | {"encoder_attention_mask_2": mask(3, 2, length=3), "image_embeds": draw(2, 3, 8)}
            | {"timestep": steps().double()}
        ),
    ),
    "HunyuanVideoFramepackTransformer3DModel": Case(
        HUNYUAN | {"has_image_proj": True, "image_proj_dim": 8, "has_clean_x_embedder": True},
        framepack,
        in_double=False,
    ),
    "JoyImageEditTransformer3DModel": Case(
        {"in_channels": 4, "hidden_size": 36, "num_attention_heads": 3, "text_dim": 8, "num_layers": 2}
        | {"rope_dim_list": [4, 4, 4]},
        lambda draw: wan(draw) | {"timestep": steps().double()},
    ),
    "JoyImageEditPlusTransformer3DModel": Case(
        {"in_channels": 4, "hidden_size": 36, "num_attention_heads": 3, "text_dim": 8, "num_layers": 2}
        | {"rope_dim_list": [4, 4, 4]},
        lambda draw: (
            {"hidden_states": draw(2, 45, 4, 1, 2, 2), "timestep": steps().double()}
            | draw.text()
            | {"shape_list": [[(1, 5, 6), (1, 3, 5)], [(1, 5, 5), (1, 2, 5)]]}
        ),
    ),
    "Kandinsky5Transformer3DModel": Case(
        KANDINSKY, lambda draw: kandinsky(draw) | {"text_rope_pos": torch.arange(7)}
    ),
    "Kandinsky6Transformer3DModel": Case(
        KANDINSKY | {"visual_cond": False, "in_audio_dim": 4, "out_audio_dim": 4}, kandinsky6
    ),
    "Kandinsky6SRTransformer3DModel": Case(
        {"in_visual_dim": 4, "out_visual_dim": 4, "time_dim": 8, "model_dim": 32, "ff_dim": 24}
        | {"num_visual_blocks": 2, "axes_dims": (4, 4, 8), "nabla_window": (3, 3, 3)},
        lambda draw: {"hidden_states": draw(1, 3, 8, 16, 9), "timestep": steps(1).double()},
        has_backward=False,
    ),
    "LTXVideoTransformer3DModel": Case(
        {"cross_attention_dim": 36, "num_layers": 2, "caption_channels": 8, **CHANNELS, **HEADS}, ltx
    ),
    "LTX2VideoTransformer3DModel": Case(LTX2, ltx2),
    "LatteTransformer3DModel": Case(
        {
            "sample_size": 10,
            "num_layers": 2,
            "patch_size": 2,
            "caption_channels": 8,
            "cross_attention_dim": 36,
        }
        | {"num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single", "norm_elementwise_affine": False}
        | {"video_length": 3, **CHANNELS, **HEADS},
        lambda draw: draw.video(height=10, width=10) | draw.text(),
    ),
    "MiniMaxH3Transformer3DModel": Case(
        {
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "hidden_size": 24,
            "num_layers": 2,
            "ffn_dim": 24,
        }
        | {"num_refiner_layers": 1, "in_channels": 4, "audio_in_channels": 6, "text_dim": 8, "freq_dim": 8}
        | {"time_embed_hidden_dim": 24, "time_embed_dim": 16, "rope_freq_dim": 2},
        minimax_h3,
    ),
    "MochiTransformer3DModel": Case(
        {
            "num_layers": 2,
            "pooled_projection_dim": 8,
            "in_channels": 4,
            "text_embed_dim": 8,
            "time_embed_dim": 4,
        }
        | {"max_sequence_length": 7, **HEADS},
        lambda draw: wan(draw) | {"encoder_attention_mask": mask(7, 5)},
    ),
    "MotifVideoTransformer3DModel": Case(
        {
            "in_channels": 9,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 2,
            "num_decoder_layers": 1,
        }
        | {"text_embed_dim": 8, "image_embed_dim": 4, "rope_axes_dim": (4, 4, 4), **HEADS}
        | {"enable_text_cross_attention_dual": True, "enable_text_cross_attention_single": True},
        lambda draw: draw.video(channels=9) | draw.text() | {"encoder_attention_mask": mask(7, 5)},
    ),
    "SanaVideoTransformer3DModel": Case(
        {"num_layers": 2, "num_cross_attention_heads": 3, "cross_attention_head_dim": 12, **CHANNELS, **HEADS}
        | {"cross_attention_dim": 36, "caption_channels": 8, "sample_size": 5, "rope_max_seq_len": 32},
        wan,
    ),
    "SanaWMTransformer3DModel": Case(
        {"in_channels": 4, "num_layers": 2, "hidden_size": 36, "num_attention_heads": 3, "softmax_every_n": 2}
        | {"linear_head_dim": 12, "chunk_plucker_channels": 4, "chunk_plucker_post_attn_blocks": 2}
        | {"caption_channels": 8, "mlp_ratio": 2.0},
        lambda draw: (
            {
                "hidden_states": draw(2, 4, 3, 3, 5),
                "timestep": steps()[:, None, None].expand(2, 1, 3),
                "chunk_plucker": draw(2, 4, 3, 3, 5),
            }
            | {"encoder_hidden_states": draw(2, 1, 7, 8), "mask": mask(7, 5)}
        ),
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Case(LTX2, sana_wm_refiner),
    "SkyReelsV2Transformer3DModel": Case(WAN, wan),
    "TransformerTemporalModel": Case(
        SD | {"in_channels": 4}, lambda draw: {"hidden_states": draw(6, 4, 3, 5), "num_frames": 3}
    ),
    "WanTransformer3DModel": Case(WAN, wan),
    "WanVACETransformer3DModel": Case(
        WAN | {"num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 12},
        lambda draw: wan(draw) | {"control_hidden_states": draw(2, 12, 3, 6, 10)},
    ),
    "WanAnimateTransformer3DModel": Case(
        WAN
        | {
            "in_channels": 12,
            "latent_channels": 4,
            "image_dim": 8,
            "motion_encoder_size": 16,
            "motion_dim": 4,
        }
        | {
            "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
            "motion_style_dim": 8,
            "motion_encoder_dim": 8,
        }
        | {"face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2},
        wan_animate,
    ),
    "WanAnimate2Transformer3DModel": Case(
        {"text_len": 7, "in_dim": 12, "dim": 36, "ffn_dim": 24, "freq_dim": 8, "text_dim": 8, "out_dim": 4}
        | {"num_heads": 3, "num_layers": 2},
        wan_animate_2,
    ),
}
