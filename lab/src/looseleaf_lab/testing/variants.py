"""Shapes of attention tests: a named variant per feature and size."""

from looseleaf_lab.testing.scene import Shape

VARIANTS: dict[str, Shape] = {
    "gqa": Shape(),
    "mha": Shape(num_qo_heads=3, num_kv_heads=3, head_dim=32),
    "mqa": Shape(num_qo_heads=7, num_kv_heads=1, head_dim=32),
    "head-dim-80": Shape(head_dim=80),
    "head-dim-96": Shape(head_dim=96),
    "head-dim-128": Shape(head_dim=128),
    "head-dim-256": Shape(head_dim=256, num_qo_heads=2, num_kv_heads=1),
    "page-size-32": Shape(page_size=32),
    "page-size-64": Shape(page_size=64),
    "interleaved": Shape(interleaved=True),
    "partial-rotary": Shape(head_dim=80, rotary_dim=32),
    "partial-interleaved": Shape(rotary_dim=24, interleaved=True),
    "soft-cap": Shape(soft_cap=2.0, softmax_scale=0.5),
    "window": Shape(window=19),
    "alibi": Shape(alibi=True, rotary_dim=0),
    "masks": Shape(masks=True),
    "patches": Shape(masks=True, patches=True),
    "latent": Shape(
        head_dim=48, num_qo_heads=6, num_kv_heads=1, rotary_dim=16, interleaved=True, latent=True
    ),
    "latent-patches": Shape(
        head_dim=40,
        num_qo_heads=6,
        num_kv_heads=1,
        rotary_dim=8,
        latent=True,
        masks=True,
        patches=True,
        window=40,
    ),
    "per-head-pages": Shape(per_head=True),
    "everything": Shape(
        masks=True, patches=True, soft_cap=5.0, window=40, alibi=True, rotary_dim=48
    ),
}
