"""The `format` of a schema as a regular expression, for text that stands without JSON's quotes.

Dates and times as in RFC 3339, durations in its appendix A, mailboxes in RFC 5321, hosts in
RFC 1123, addresses in RFC 4291 and URIs in RFC 3986.
"""


def _ipv6() -> str:
    """Returns the pattern of an IPv6 address: eight groups, or fewer around one `::`."""
    group = "[0-9a-fA-F]{1,4}"
    cut = (
        f"(?:{group}(?::{group}){{0,{before - 1}}})?::(?:{group}(?::{group}){{0,{6 - before}}})?"
        for before in range(1, 7)
    )
    return "|".join(
        [f"(?:{group}:){{7}}{group}", *cut, f"(?:{group}:){{7}}:", f":(?::{group}){{7}}"]
    )


def _falling(units: str) -> str:
    """Returns the pattern of units with numbers, each followed by the next smaller unit only:
    `1Y2M`, not `1Y2D`."""
    found = ""
    for unit in reversed(units):
        found = f"[0-9]+{unit}(?:{found})?" if found else f"[0-9]+{unit}"
    return found


def _any_falling(units: str) -> str:
    return "|".join(_falling(units[at:]) for at in range(len(units)))


_DATE = (
    "[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-9])"
    "|(?:0[13-9]|1[0-2])-30|(?:0[13578]|1[02])-31)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?"
    r"(?:[zZ]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_CLOCK = f"T(?:{_any_falling('HMS')})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_IPV6 = _ipv6()
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%\&'*+\-\/=?^_`{|}\~]+"
_HEX = "[0-9a-fA-F]"
_SIGNS = r"a-zA-Z0-9\-._\~!$\&'()*+,;="
_CODED = f"%{_HEX}{{2}}"
_SEGMENT = f"(?:[{_SIGNS}:@]|{_CODED})"
_PATH = rf"(?:\/{_SEGMENT}*)*"
_AUTHORITY = (
    rf"(?:(?:[{_SIGNS}:]|{_CODED})*@)?(?:\[(?:{_IPV6})\]|(?:[{_SIGNS}]|{_CODED})*)(?::[0-9]*)?"
)
_QUERY = rf"(?:{_SEGMENT}|[\/?])*"

FORMATS = {
    "date-time": f"{_DATE}[tT]{_TIME}",
    "time": _TIME,
    "date": _DATE,
    "duration": f"P(?:(?:{_any_falling('YMD')})(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_HOST}|\[{_IPV4}\])",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "uri": (
        rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:\/\/{_AUTHORITY}{_PATH}|\/(?:{_SEGMENT}+{_PATH})?"
        rf"|{_SEGMENT}+{_PATH}|)(?:\?{_QUERY})?(?:\#{_QUERY})?"
    ),
}
