"""KV layouts on the wire."""

from epd.engine.kv_layout import KvLayout, KvRegion
from epd.v1 import common_pb2


def layout_to_proto(layout: KvLayout) -> common_pb2.KvLayout:
    """The wire form of a layout with its regions."""
    return common_pb2.KvLayout(
        protocol_version=layout.protocol_version,
        model_digest=layout.model_digest,
        layer_count=layout.layer_count,
        kv_head_count=layout.kv_head_count,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_size=layout.block_size,
        tp_degree=layout.tp_degree,
        tp_rank=layout.tp_rank,
        head_start=layout.head_start,
        head_count=layout.head_count,
        planes=layout.planes,
        regions=[_region_to_proto(region) for region in layout.regions],
    )


def layout_from_proto(message: common_pb2.KvLayout) -> KvLayout:
    """The layout of a wire message. Values are taken as they are: pairing compares them."""
    return KvLayout(
        protocol_version=message.protocol_version,
        model_digest=message.model_digest,
        layer_count=message.layer_count,
        kv_head_count=message.kv_head_count,
        head_dim=message.head_dim,
        dtype=message.dtype,
        block_size=message.block_size,
        tp_degree=message.tp_degree,
        tp_rank=message.tp_rank,
        head_start=message.head_start,
        head_count=message.head_count,
        planes=message.planes,
        regions=tuple(_region_from_proto(region) for region in message.regions),
    )


def _region_to_proto(region: KvRegion) -> common_pb2.KvRegion:
    return common_pb2.KvRegion(
        first_layer=region.first_layer,
        layer_count=region.layer_count,
        segment=common_pb2.Segment(
            address=region.address, length=region.length, device_id=region.device_id
        ),
        layer_stride=region.layer_stride,
        block_stride=region.block_stride,
    )


def _region_from_proto(message: common_pb2.KvRegion) -> KvRegion:
    return KvRegion(
        first_layer=message.first_layer,
        layer_count=message.layer_count,
        address=message.segment.address,
        length=message.segment.length,
        device_id=message.segment.device_id,
        layer_stride=message.layer_stride,
        block_stride=message.block_stride,
    )
