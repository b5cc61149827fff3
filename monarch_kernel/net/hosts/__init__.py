"""Connections between hosts: the socket of the controller, the relay of each host, and the handshakes of new connections.

Theory of operation
===================

::

    controller (host 0)                      host 1                            host 2
     ZmqRouter - Relay - Links == CURVE == Links - Relay - Gateway == CURVE == Gateway
         | ipc                                              | unix                 | unix
      ranks and agent of this machine                     ranks                  ranks

There is one encrypted connection for each host (`net.hosts.links`). A peer without the key pair of the session is refused
and counted before any of its bytes is read (`net.hosts.handshakes`). Frame 0 of a message is an `Envelope` with its
receivers; agents pass on the rest unread. `Relay` is the same pure class at all ends: it numbers messages and repeats what
a broken connection lost, so order per sender holds across hosts. Messages to many ranks travel once per connection, and
equal answers of many ranks become one.

Ranks of two hosts talk through their agents. The controller says on which host a process is (`ConnectHost`), and its agent
dials that host. Until they are connected, or if they can't be, messages go through the controller. Nothing above the transport
knows of this: `ProcessStatus` without an address means "through your agent".

A relay drops and counts what can't be right: envelopes with impossible ids or names, a host that the controller does not
know, an acknowledgement of something never sent, a rank that speaks from another host than its own, messages of the
controller that do not come by the connection that leads to it. Hosts share their keys, so this protects against faults and
not against each other.
"""
