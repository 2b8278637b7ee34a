"""`distributed_save_hf_checkpoint`, by the name and the arguments that users of quantization toolkits know."""

from __future__ import annotations

import os

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshpar.export.save import export_hf
from meshpar.export.state import exported_state


def distributed_save_hf_checkpoint(
    model: nn.Module,
    export_dir: str | os.PathLike[str],
    maxbound: float,
    kv_cache_format: str | None,
    max_shard_size: int | str = "10GB",
    is_modelopt_qlora: bool = False,  # noqa: FBT001, FBT002
    *,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint of Hugging Face from a quantized model that lies over ranks; no rank gathers.

    It is `export_hf` of `exported_state`: see there for what becomes of the state of quantizers, of tied weights and of
    LoRA, and for the files. It may be called under `torch.inference_mode()`.

    Args:
        model: the model; parallelized by meshpar, `fully_shard`, `parallelize_module`, or not at all.
        export_dir: the folder, the same for all ranks.
        maxbound: the largest number of the format of key and value caches, 448 for all of them; not looked at where
            there are none.
        kv_cache_format: "FP8", "NVFP4" or "NVFP4_AFFINE", where caches of keys and values are quantized.
        max_shard_size: how many bytes of tensors a file may have.
        is_modelopt_qlora: whether the model is a quantized base with LoRA, of which the base alone is wanted.
        overwrite: whether a checkpoint that is there is replaced.

    Communication:
        That of `exported_state` and of `export_hf`.

    Raises:
        SpecError: arguments, names or values that cannot be exported; on all ranks, and nothing was written.
        CheckpointError: the folder is occupied, or a step failed; on all ranks, and what was there is as it was.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> distributed_save_hf_checkpoint(nn.Linear(2, 3), folder, 448.0, None)
        >>> os.listdir(folder)
        ['model.safetensors']
    """
    state = exported_state(
        model, kv_cache_format=kv_cache_format, maxbound=maxbound, is_modelopt_qlora=is_modelopt_qlora
    )
    config_of = model.module if isinstance(model, DistributedDataParallel) else model
    export_hf(state, export_dir, max_shard_size=max_shard_size, overwrite=overwrite, config_of=config_of)
