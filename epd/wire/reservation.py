"""Reservations on the wire."""

from epd.handover.control import Reservation
from epd.v1 import decode_pb2
from epd.wire.transfer import segment_from_proto, segment_to_proto

#: A Reserve is traced and measured as a call of this method, though it travels on the pair's
#: stream, which is there already: a call of its own takes twice as long.
RESERVE_METHOD = "epd.v1.DecodeService/Reserve"


def reservation_to_proto(reservation: Reservation) -> decode_pb2.Reservation:
    """The wire form; the asker knows the transfer's id."""
    return decode_pb2.Reservation(
        generation=reservation.generation,
        block_ids=reservation.block_ids,
        seal=segment_to_proto(reservation.seal),
        cached_block_count=reservation.cached_block_count,
        progress_timeout_ms=int(reservation.progress_timeout_s * 1000),
        checksum=reservation.checksum,
        layer_notices=reservation.layer_notices,
    )


def reservation_from_proto(transfer_id: str, message: decode_pb2.Reservation) -> Reservation:
    """The reservation of one transfer."""
    return Reservation(
        transfer_id=transfer_id,
        generation=message.generation,
        block_ids=tuple(message.block_ids),
        seal=segment_from_proto(message.seal),
        cached_block_count=message.cached_block_count,
        progress_timeout_s=message.progress_timeout_ms / 1000,
        checksum=message.checksum,
        layer_notices=message.layer_notices,
    )
