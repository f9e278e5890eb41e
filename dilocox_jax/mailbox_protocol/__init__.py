"""The mailbox: replicas that share no network exchange through a store.

The store is a folder or a bucket. The pages in docs/mailbox/ say how to use a
mailbox, what it guarantees, and what damage somebody without the secret could
do who can write into the store. This package does not import JAX: a message is
a list of numpy arrays.

Words of this package (docs/concepts.md defines more of them):

- event: one exchange of the run's schedule, numbered from 0.
- turn: the number of a message within an event, from 0. Most codecs need one
  turn; the low-rank codec needs two.
- kind: events have the same kind if their messages have the same size. It is
  the number of the fragment, for example.
- expected: a replica whose message the others wait for.
- grace time: the seconds that they wait for an expected replica.
- quorum: the least number of messages that an event needs.
- manifest: the signed list of the messages that are averaged in a turn. A
  message in it is *listed*. A turn with a manifest is *settled*.
- roster: the replicas that take part after an event.
- seat: an object that says from which event a replica takes part. A replica
  creates one when it joins, and another one when it comes back.
- shared state: the outer parameters, the outer optimizer and the codec's common
  state. All replicas have the same one, up to rounding.
- fingerprint: a few random sums of the shared state, by which replicas compare
  it.
- snapshot: the shared state before an event, as objects in the store.
- interval: the events from one due snapshot to the next one. They are deleted
  together.
- mark: an object which says that an interval was deleted.
- slice, share: if the mean is made *in shares*, each message is cut into
  slices. Share s is the mean of all slices with number s, and one replica
  makes it.
- residual: what the encoding of a message, or of a share, has lost. It is added
  to the next one.
- inbox: the messages of one turn, as one replica has read them.
"""
