"""The reports of ranks to rank 0, as frames on their standard output."""

import msgspec

CUT = "can't reach the next rank any more: check the cable"
"""Why a rank is lost: its connections have ended."""


class RankReady(msgspec.Struct, tag=True):
    """MLX is imported; the rank waits for the first input to join the group."""

    recommended_bytes: int | None
    """Metal's recommended working set; None without Metal."""


class RankHeartbeat(msgspec.Struct, tag=True):
    """The rank is alive."""


class RankDigest(msgspec.Struct, tag=True):
    steps: int
    value: int


class RankFailed(msgspec.Struct, tag=True):
    why: str


REPORT_BYTES = 64 << 10
"""The limit on a report. What a shell prints is far above it: four letters read as a length."""

RankReport = RankReady | RankHeartbeat | RankDigest | RankFailed

encode_report = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(RankReport).decode
