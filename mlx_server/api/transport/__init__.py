"""uvicorn's and h11's own protocols, with the limits that they lack.

uvicorn limits neither the connections of one address, nor the time that a request takes to arrive,
nor the bytes that wait for a client that does not read. h11 accepts message framing that another
server on the way may read differently. None of this can be configured, so the classes of this
package override it; no other module touches the internals of either library.
"""
