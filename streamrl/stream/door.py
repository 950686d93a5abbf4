"""Who comes in at the replay service: peers with the run's client key, nobody else.

ZeroMQ asks by ZAP (RFC 27) about every peer whose CURVE handshake is good; whoever does not speak CURVE, or
not to this service's key, fails before that. The socket's monitor reports both, so it does the counting.
"""

from __future__ import annotations

import logging
import threading

import zmq
from zmq.utils import z85

from streamrl.stream.keys import ServiceKeys

log = logging.getLogger(__name__)

_ZAP = "inproc://zeromq.zap.01"  # libzmq's fixed name, one for each context
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Door:
    """Guards one bound socket from its construction until the socket's context ends.

    >>> door = Door(context, socket, service_keys(folder))  # before bind
    >>> door.refused
    0
    """

    def __init__(self, context: zmq.Context, socket: zmq.Socket, keys: ServiceKeys) -> None:
        """Set the socket's keys and answer for it in a thread that ends with `context`."""
        self.refused = 0  # attempts to connect that were turned away
        self._welcome = z85.decode(keys.client_public)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        questions = context.socket(zmq.REP)
        questions.bind(_ZAP)
        failures = socket.get_monitor_socket(_FAILED)
        threading.Thread(target=self._serve, args=(questions, failures), name="door", daemon=True).start()

    def _serve(self, questions: zmq.Socket, failures: zmq.Socket) -> None:
        poller = zmq.Poller()
        poller.register(questions, zmq.POLLIN)
        poller.register(failures, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if questions in ready:
                    questions.send_multipart(self._answer(questions.recv_multipart()))
                if failures in ready:
                    failures.recv_multipart()
                    self._count()
        except zmq.ContextTerminated:
            return
        finally:
            questions.close(linger=0)
            failures.close(linger=0)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """ZAP's reply to `[version, id, domain, address, identity, mechanism, key]`."""
        version, request, *_, mechanism, key = question
        known = mechanism == b"CURVE" and key == self._welcome
        status = [b"200", b"OK"] if known else [b"400", b"not a key of this run"]
        return [version, request, *status, b"", b""]

    def _count(self) -> None:
        if not self.refused:
            log.warning("a peer without this run's key was turned away; further ones are only counted")
        self.refused += 1
