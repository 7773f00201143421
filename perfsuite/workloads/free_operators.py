"""Operators of torch that do no FLOPs in any of our conventions: everything but matmuls, convolutions and solvers."""

from __future__ import annotations

from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Profiling, device queries and communication: no arithmetic, or none that a device's FLOP/s could be spent on.
FREE_NAMESPACES = _names("prim profiler c10d _c10d_functional _c10d_functional_autograd")

# These hand out memory or look at it; a step that runs nothing else does no work that torch can see.
ALLOCATING = _names(
    """
    empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_ set_
    lift lift_fresh alias detach detach_ record_stream is_pinned is_same_size _has_same_storage_numel
    dim numel size stride storage_offset sym_numel sym_size sym_stride sym_storage_offset is_contiguous
    sym_is_contiguous is_strides_like_format is_non_overlapping_and_dense
    """
)

# In-place forms (add_) are found under their plain names. Element-wise operators carry a tag and need no entry,
# views neither.
FREE_NAMES = ALLOCATING | _names(
    """
    _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async _local_scalar_dense
    _linalg_check_errors _print sym_constrain_range sym_constrain_range_for_size

    _copy_from _copy_from_and_resize _lazy_clone _pin_memory _to_copy _unsafe_view _reshape_alias _resize_output
    alias_copy as_strided_copy as_strided_scatter block_diag cat channel_shuffle constant_pad_nd copy
    diag_embed diagonal_backward diagonal_copy diagonal_scatter expand_copy fill flip full full_like lift_fresh_copy
    narrow_copy new_full new_ones new_zeros ones ones_like permute_copy pixel_shuffle pixel_unshuffle
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward reflection_pad3d
    reflection_pad3d_backward repeat repeat_interleave replication_pad1d replication_pad1d_backward
    replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward roll rot90
    scalar_tensor select_backward select_copy select_scatter slice_backward slice_copy slice_scatter
    split_with_sizes_copy squeeze_copy stack t_copy transpose_copy tril triu unbind_copy unfold_backward unfold_copy
    unsafe_split unsafe_split_with_sizes unsqueeze_copy view_copy zero zeros zeros_like
    _chunk_cat _pack_padded_sequence _foreach_copy _foreach_zero

    arange eye linspace logspace range tril_indices triu_indices

    _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_forward_only
    _index_put_impl _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate
    bucketize embedding embedding_dense_backward embedding_renorm gather index index_add index_copy index_fill
    index_put index_reduce index_select isin masked_scatter masked_scatter_backward masked_select
    nonzero nonzero_static put scatter scatter_add scatter_reduce searchsorted take

    _fused_dropout _masked_scale bernoulli cauchy exponential geometric log_normal multinomial native_dropout normal
    normal_functional poisson rand rand_like randint randint_like randn randn_like random randperm uniform
    _philox_normal _philox_uniform

    complex dist elu_backward floor_divide glu glu_backward hardshrink_backward hardsigmoid_backward hardswish
    hardswish_backward hardtanh_backward leaky_relu_backward log_sigmoid_backward log_sigmoid_forward polar
    rrelu_with_noise
    rrelu_with_noise_backward softplus_backward softshrink_backward _prelu_kernel _prelu_kernel_backward
    _add_relu addr

    all any amax amin aminmax _aminmax argmax argmin bincount count_nonzero cummax cummin cumprod cumsum histc
    _is_all_true _is_any_true kthvalue linalg_vector_norm logcumsumexp _logcumsumexp logsumexp mean median
    mode nanmedian nansum norm prod renorm sort std std_mean sum topk trace var var_mean
    _unique2 unique_consecutive unique_dim _foreach_norm _foreach_powsum

    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax _masked_softmax
    _masked_softmax_backward softmax log_softmax
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_group_norm
    native_group_norm_backward native_batch_norm native_batch_norm_backward _native_batch_norm_legit
    _native_batch_norm_legit_no_training _native_batch_norm_legit_functional _batch_norm_with_update
    _batch_norm_no_update batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm
    miopen_batch_norm_backward batch_norm_stats batch_norm_elemt batch_norm_gather_stats_with_counts
    batch_norm_backward_reduce batch_norm_backward_elemt _weight_norm_interface _weight_norm_interface_backward

    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d
    avg_pool3d_backward max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
    max_pool3d_with_indices_backward

    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits huber_loss
    huber_loss_backward mse_loss mse_loss_backward nll_loss_forward nll_loss_backward nll_loss2d_forward
    nll_loss2d_backward smooth_l1_loss smooth_l1_loss_backward

    _amp_foreach_non_finite_check_and_unscale _amp_update_scale _fused_adagrad _fused_adam _fused_adamw _fused_sgd
    """
)


def is_free(operator: Any) -> bool:
    """Whether an operator overload is known to do no FLOPs: a view, element-wise, or on the list above."""
    if operator.namespace in FREE_NAMESPACES:
        return True
    if operator.namespace != "aten":
        return False
    name = _plain_name(operator)
    return name in FREE_NAMES or _is_view(operator) or _is_elementwise(name)


def computes(operator: Any) -> bool:
    """Whether an operator overload touches data, free or not."""
    return str(operator.overloadpacket.__name__) not in ALLOCATING and not _is_view(operator)


def _plain_name(operator: Any) -> str:
    """The name without the underscore of an in-place form."""
    name = str(operator.overloadpacket.__name__)
    return name if name in FREE_NAMES else name.removesuffix("_")


def _is_view(operator: Any) -> bool:
    """Whether only shape and strides change."""
    import torch

    return operator.is_view or torch.Tag.inplace_view in operator.tags


def _is_elementwise(name: str) -> bool:
    """Whether any overload of the operator, or of the one that it applies to a list of tensors, is tagged so."""
    import torch

    packet = getattr(torch.ops.aten, name.removeprefix("_foreach_"), None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)
