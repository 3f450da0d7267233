"""Functions of torch and methods of tensors that no model computes with, by why: the page names them and nothing runs them."""

from __future__ import annotations

import re

SETTINGS = "of torch's settings and generators, not of tensors"
PYTHON = "answers Python about types, sizes or names; a model may ask it, and no graph holds it"
MEMORY = "of a tensor's memory, device or file, which a graph does not know"
TAPE = "of autograd's tape, which a graph does not have"
QUANTIZED = "of quantized tensors, which needle does not have"
SPARSE = "of sparse and nested tensors, which needle does not have"
VENDOR = "a kernel of one library; torch's function of the same name without it converts"
COMPILER = "of torch's compiler and its programs"
GONE = "torch keeps the name alone: calls are an error"
DISTRIBUTED = "of batch norms across processes"
EACH = "calls a function of Python for each element"

TORCH = {
    SETTINGS: r"(set|get|is|are)_.*(autocast|anomaly|determin|default_d|default_t|num_\w*threads|flush|precision|warn|"
    r"rng|print|grad_enabled|inference_mode|vulkan).*|autocast_.*|clear_autocast_cache|init_num_threads|manual_seed|"
    r"seed|initial_seed|use_deterministic_algorithms|compiled_with_cxx11_abi|get_file_path|get_device_module|"
    r"prepare_multiprocessing_environment|profiler_.*|thread_safe_generator|set_default_\w+",
    PYTHON: r"can_cast|promote_types|result_type|typename|is_tensor|is_storage|broadcast_shapes|classproperty|sym_.*",
    MEMORY: r"from_\w+|frombuffer|to_dlpack|load|save|is_distributed|slice_inverse|resize_as_|as_strided_",
    QUANTIZED: r"q_.*|quantize.*|int_repr|dequantize|choose_qparams_optimized|fused_moving_avg_obs_fake_quant|"
    r"empty_quantized",
    SPARSE: r"sparse_.*|.*_sparse_|c?col_indices_copy|c?row_indices_copy|indices_copy|values_copy|dsmm|hsmm|hspmm|"
    r"s?spmm|smm|saddmm|sspaddmm|native_norm",
    VENDOR: r"(cudnn|miopen|mkldnn|fbgemm)_.*",
    COMPILER: r"compile|fork|wait|import_ir_.*|parse_.*|merge_type_.*|unify_type_list|cond|while_loop|vmap",
    GONE: r"eig|lstsq|matrix_rank|solve|symeig",
    DISTRIBUTED: r"batch_norm_.+",
}
METHODS = {
    PYTHON: r"is_(distributed|set_to|shared|pinned|coalesced|contiguous)|dim_order|tolist|numpy|__len__",
    MEMORY: r"(const_)?data_ptr|storage.*|untyped_storage|stride|pin_memory|share_memory_|record_stream|cuda|ipu|xpu|"
    r"mtia|module_load|set_|resize.*|as_subclass|as_strided_|slice_inverse|new|to_mkldnn|dim_order",
    TAPE: r"backward|register_\w+|retain_grad|reinforce",
    QUANTIZED: r"q_.*|qscheme|int_repr|dequantize",
    SPARSE: r".*sparse.*|c?col_indices|c?row_indices|indices|values|coalesce|dense_dim|sspaddmm|smm|to_padded_tensor",
    GONE: r"eig|lstsq|solve|symeig|index",
    EACH: r"apply_|map2?_",
}


def meaningless(name: str) -> str:
    """Why nothing is to be shown of a function or method, or nothing for all others."""
    home, _, own = name.rpartition(".")
    groups = {"torch": TORCH, "torch.Tensor": METHODS}.get(home, {})
    return next((why for why, names in groups.items() if re.fullmatch(names, own)), "")
