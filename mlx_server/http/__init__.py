"""The wire under the endpoints: connections, their security, strict JSON, streams, errors, metrics.

`connections`, `web_sockets`, `admission` and `server` are uvicorn's and h11's protocols with limits
that they lack. uvicorn does not limit the connections of one address, the time that a request takes
to arrive or the bytes that wait for a client that does not read. h11 accepts message framing that a
proxy in front of the server may read differently. None of this can be configured, so these classes
override it; no other module touches the internals of either library.
"""
