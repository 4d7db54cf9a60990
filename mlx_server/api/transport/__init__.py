"""uvicorn's and h11's protocols with limits that they lack.

uvicorn does not limit the connections of one address, the time that a request takes to arrive or
the bytes that wait for a client that does not read. h11 accepts message framing that a proxy in
front of the server may read differently. None of this can be configured, so the classes of this
package override it; no other module touches the internals of either library.
"""
