"""Prefill attention on Hopper with queries turned ahead of it: another schedule of
`looseleaf.ops.hopper_attention` for documents that are short, where turning a tile of queries at
every span holds both computing groups up; no operator of its own.

A launch before the kernel's own turns every row once for every span. The fetching warp then brings
the turned tile of the next span while the groups are busy with this one. It costs memory for one
copy of the queries per span."""
