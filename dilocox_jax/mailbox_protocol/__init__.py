"""The mailbox: replicas exchange messages as objects in a common store.

The store is a folder or a bucket, so replicas need no network between them. The
pages in docs/mailbox/ say how to use a mailbox, what it guarantees, and what
damage is possible if somebody can write into the store but does not have the
secret. This package does not import JAX: a message is a list of numpy arrays.

Words of this package (docs/concepts.md defines more of them):

- event: one exchange of the run's schedule, numbered from 0.
- turn: a part of an event in which each replica sends one message. Turns are
  numbered from 0. Most codecs need one turn; the low-rank codec needs two.
- kind: the number of the fragment that an event exchanges.
- expected: a replica whose message the others wait for.
- grace time: the seconds that a replica waits for the messages of the expected
  replicas, from when it has sent its own.
- quorum: the least number of messages in the first turn of an event.
- manifest: the signed list of the messages that are averaged in a turn. A
  message in it is *listed*. A turn with a manifest is *settled*.
- roster: the replicas that take part after an event.
- seat: an object that says from which event a replica takes part. A replica
  creates one when it joins, and another one when it comes back.
- shared state: the outer parameters, the outer optimizer and the codec's common
  state, which should be equal in all replicas up to rounding.
- fingerprint: a few random sums of the shared state, by which replicas compare
  it.
- snapshot: the shared state before an event, as objects in the store.
- interval: the events from one due snapshot to the next one. Their objects are
  deleted together.
- slice, share: if the mean is made *in shares*, each message is cut into
  slices. Share s is the mean of all slices with number s, and one replica
  makes it.
- residual: what was lost in encoding a share. It can be added to the next mean
  of the same slice.
"""
