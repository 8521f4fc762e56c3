# SPDX-License-Identifier: Apache-2.0
"""Tiny models of diffusers' transformer classes for audio and proteins, and their inputs.

Each has two blocks and, where its class admits it, an odd number of tokens and a batch of two.
"""

from __future__ import annotations

import torch

from .diffusion_case import CHANNELS, HEADS, Case, Draw, Inputs, mask


def proteina(draw: Draw) -> Inputs:
    residues = mask(21, 17, length=21)
    return {
        "bb_ca": draw(2, 21, 3),
        "local_latents": draw(2, 21, 8),
        "bb_ca_time": torch.tensor([0.25, 0.5], dtype=torch.float64),
        "local_latents_time": torch.tensor([0.5, 0.75], dtype=torch.float64),
        "padding_mask": residues,
        "token_type": draw.ids(7, 2, 21),
        "conditioning": {
            "is_in_context_conditioning": torch.zeros(2, 21),
            "supports_local_latent": torch.ones(2, 21),
            "molecule_iid": draw.ids(3, 2, 21),
        },
    }


SEQUENCES: dict[str, Case] = {
    "AceStepTransformer1DModel": Case(
        {
            "hidden_size": 36,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "head_dim": 12,
        }
        | {"num_key_value_heads": 1, "in_channels": 12, "audio_acoustic_hidden_dim": 4, "sliding_window": 8},
        lambda draw: (
            draw.tokens(count=90)
            | draw.text(36)
            | {"timestep_r": torch.tensor([0.1, 0.2], dtype=torch.float64), "context_latents": draw(2, 90, 8)}
        ),
    ),
    "LongCatAudioDiTTransformer": Case(
        {
            "dit_dim": 36,
            "dit_depth": 2,
            "dit_heads": 3,
            "dit_text_dim": 8,
            "latent_dim": 4,
            "text_conv": False,
        },
        lambda draw: (
            draw.tokens()
            | draw.text()
            | {"encoder_attention_mask": mask(7, 5), "attention_mask": mask(45, 40, length=45)}
        ),
    ),
    "MiniMaxMusic3RVQDepthDecoder": Case(
        {
            "hidden_size": 36,
            "num_layers": 2,
            "num_attention_heads": 3,
            "intermediate_size": 24,
            "audio_vocab_size": 8,
        },
        lambda draw: {"inputs_embeds": draw(2, 15, 36)},
    ),
    "MiniMaxMusic3Transformer1DModel": Case(
        {"in_channels": 4, "condition_dim": 8, "num_layers": 2, "ff_inner_dim": 24, "rotary_dim": 4, **HEADS}
        | {"fourier_embedding_dim": 8},
        lambda draw: (
            {"hidden_states": draw(2, 4, 45), "encoder_hidden_states": draw(2, 45, 8)}
            | {"timestep": torch.tensor([0.25, 0.5], dtype=torch.float64)}
        ),
    ),
    "StableAudioDiTModel": Case(
        {"sample_size": 44, "num_layers": 2, "num_key_value_attention_heads": 3, "cross_attention_dim": 36}
        | {
            "time_proj_dim": 8,
            "global_states_input_dim": 8,
            "cross_attention_input_dim": 8,
            **CHANNELS,
            **HEADS,
        },
        lambda draw: (
            {"hidden_states": draw(2, 4, 44), "timestep": torch.tensor([0.25, 0.5], dtype=torch.float64)}
            | draw.text()
            | {"global_hidden_states": draw(2, 1, 8), "attention_mask": mask(44, 40, length=44)}
        ),
    ),
    "StableAudio3DiTModel": Case(
        {
            "io_channels": 4,
            "embed_dim": 48,
            "depth": 2,
            "num_heads": 3,
            "cond_token_dim": 8,
            "global_cond_dim": 8,
        }
        | {"local_add_cond_dim": 5, "timestep_features_dim": 8, "ff_mult": 2, "num_memory_tokens": 3},
        lambda draw: (
            {"hidden_states": draw(2, 4, 44), "timestep": torch.tensor([0.25, 0.5], dtype=torch.float64)}
            | draw.text()
            | {"global_hidden_states": draw(2, 8), "local_add_cond": draw(2, 5, 44)}
            | {"encoder_attention_mask": mask(7, 5)}
        ),
    ),
    "T5FilmDecoder": Case(
        {"input_dims": 4, "targets_length": 45, "d_model": 36, "num_layers": 2, "num_heads": 3, "d_kv": 12}
        | {"d_ff": 24, "dropout_rate": 0.0},
        lambda draw: (
            {
                "encodings_and_masks": [
                    (draw(2, 7, 36), mask(7, 5).double()),
                    (draw(2, 3, 36), mask(3, 2, length=3).double()),
                ]
            }
            | {
                "decoder_input_tokens": draw(2, 45, 4),
                "decoder_noise_time": torch.tensor([0.25, 0.5], dtype=torch.float64),
            }
        ),
    ),
    "RFD4ProteinaTransformer": Case(
        {"nlayers": 3, "token_dim": 36, "nheads": 3, "dim_cond": 8, "pair_repr_dim": 8, "latent_dim": 8}
        | {"token_type_emb_dim": 4, "t_emb_dim": 8, "xt_pair_dist_dim": 6, "tri_mult_c": 8}
        | {
            "feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"),
            "feats_pair_cond": ("time_emb_bb_ca",),
        }
        | {"feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents"), "num_sequence_classes": 11}
        | {"feats_pair_repr": ("xt_bb_ca_pair_dists", "molecule_idx_pair")},
        proteina,
    ),
}
