/* How replicas agree through a store: a model that Spin searches completely.

   The code is dilocox_jax/mailbox_protocol/, and the protocol is stated in
   docs/how_it_works/mailbox_protocol.md. `make model` runs the searches that
   are listed in check.py.

   Each `atomic` is one request to the store, with what the replica computes
   before its next request. Between two requests all other processes may do
   anything. So every replica may be late by any number of requests.

   The words are those of the code:

   message      object event/E/0/NAME: carries units of work
   proposal     object with the list of messages that was proposed first
   manifest     object with the list that all replicas follow
   gone         first mark of a deleted event; gone_copy is the second mark
   snapshot_of  index of the snapshot before an event: the snapshot is whole
   event        number of the next event of a replica (Memory.event)
   held_back    units that a replica has done and no listed message has carried
   held         messages of this event that a replica has read (Inbox.held)
   objects      list of the event before, with its messages: the replica writes
                them again if they vanish (Agreement.objects)

   A list has a bit for each replica whose message is averaged. The code names
   a message by its digest. Here the sender names it, and the bit SECOND if it
   is the message of the second life of replica 0.

   The properties:

   - One list an event: all who follow a list follow the same one.
   - No unit of work is averaged twice.
   - Nobody follows a list that was written after its event was deleted.
   - A replica never waits for ever: when no process can do anything, every
     replica that lives has gone through all events. (The one exception is
     `a_person_is_needed`.) A search for cycles shows that every run ends there.

   How large a model is, by these macros:

   N, E, QUORUM, KEPT  Replicas, events, the quorum, and the number of snapshots
                       that are kept (in the code 3).

   What may happen, by the macros that are defined:

   KILL                Replica 0 is killed once, at any point. It comes back from
                       any earlier checkpoint, from the newest snapshot or the
                       first state, or, if the others are a quorum, never.
   LATE_WRITES         The last message or proposal of replica 0 may reach the
                       store at any time after the replica was killed.
   SNAPSHOTS           Before each event but the first, a snapshot may be
                       written. Then older events are deleted.
   ONE_SNAPSHOT        Only the last of these snapshots may be written. So it
                       deletes two events at once.
   MESSAGES_LOST       A stranger deletes one message, whichever and whenever.
   LISTS_LOST          Or one proposal or manifest.
   MARKS_LOST          Or one mark of a deleted event.
   SNAPSHOTS_LOST      Or one snapshot.
   READS_ONE_BY_ONE    A replica chooses its list, proposes the list, and reads
                       the listed messages in separate steps. Without this macro
                       each of these steps is part of the one before (see
                       below).

   Every replica may be late by any number of requests, in every model.

   Where the model differs from the code, and why:

   - There is no clock. The grace time may be over at any moment.
   - There are no seats and no roster. A replica proposes any quorum of the
     messages that are there, because it reads one message after the other,
     and because it may not know all replicas yet.
   - A waiting replica stands still until it finds something to do. In the code
     it asks again and again, and a request that finds nothing changes nothing.
   - A replica may send a message although the event is settled. In the code that
     depends on whether the other replicas wait for it.
   - Every event has one turn, and its result is applied at once.
   - States and the chain of manifests are not compared, because the first
     property says that they cannot differ. Values are always finite.
   - Any number of replicas may claim the same snapshot: they write the same.
   - All marks are kept. The code keeps those of the last 4096 intervals.
   - Two lives of a replica never send equal messages. If they are equal, the
     code need not tell them apart.

   Without READS_ONE_BY_ONE there are fewer states. The following replaces the
   steps that are missing, so that no error is lost:

   - A list that was chosen earlier can still be chosen when it is proposed. For
     an event that is deleted meanwhile, any list can be chosen.
   - When a message is lost, each replica that waits at that event may have read
     the message before, or not.
   - A replica that finds all listed messages reads them at once. Nothing that
     others do in between changes what it averages.

   Seeded faults, each of which Spin has to find:

   NO_REPEAT_CHECK     Only the message of this life empties `held_back`.
   WAIT_FOR_ALL        The grace time is never over.
   NO_PROPOSAL         The manifest is created without a proposal.
   NO_RESTORE          Objects that vanish are not written again.
   KEEP_OTHER_MESSAGE  A listed message is written again only if there is no
                       message in its place.
   NO_DELETION_MARK    Events are deleted without a mark.
   MARK_AFTER_DELETION The marks are written after the objects are deleted.
   NO_CHECK_AFTER_MANIFEST
                       A replica that reads a manifest does not look for marks.
   NO_CHECK_BEFORE_DECISION
                       Nor does a replica that creates a manifest.
   ONE_MARK            There is no second mark.
   NO_SECOND_LOOK      A replica that found no snapshot ends if event 0 is
                       deleted, although a snapshot may have come meanwhile.
*/

#ifndef N
#define N 3               /* replicas */
#endif
#ifndef E
#define E 3               /* events */
#endif
#ifndef QUORUM
#define QUORUM 2
#endif
#ifndef KEPT
#define KEPT 1
#endif
#if defined(MESSAGES_LOST) || defined(LISTS_LOST)
#define LOSS
#endif
#if defined(MARKS_LOST) || defined(SNAPSHOTS_LOST)
#define LOSS
#endif
#if defined(MESSAGES_LOST) || defined(READS_ONE_BY_ONE)
#define HOLDS_MESSAGES
#endif

#define EXISTS 128
#define SECOND 64
#define AFTER_DELETION 32 /* in a manifest: it was written after the deletion */
#define BIT(number) (1 << (number))
#define AT(an_event, replica) ((an_event) * N + (replica))

/* The store. 0 means that an object is missing. */
byte message[E * N];
byte proposal[E];
byte manifest[E];
bool gone[E];
bool gone_copy[E];
bool snapshot_of[E];

/* What each replica has in memory. */
byte event[N];
byte held[N];
byte list[N];             /* the list that it proposes or follows */
byte objects[N];
bool has_ended[N];

/* What only the properties look at. */
byte held_back[N];
byte units[E * N];        /* units of each message, until its event is agreed */
byte units_of_second[E];  /* units of each message of the second life */
byte averaged[N];         /* units of each replica that were averaged */
byte agreed[E];           /* the list that was followed first */
bool deleted[E];

#ifdef KILL
bool may_be_killed = true;
#else
#define may_be_killed false
#endif

#ifdef LOSS
bool was_lost = false;
#else
#define was_lost false
#endif

#ifdef LATE_WRITES
byte late_message;        /* units of the message that comes later */
byte late_proposal;
byte late_event;
#endif

#define is_in(a_list, replica) ((a_list) & BIT(replica))

/* The message of a replica that is in a list. */
#define named(a_list, replica) \
  (EXISTS | ((replica) == 0 -> ((a_list) & SECOND) : 0))

#if defined(SNAPSHOTS) && !defined(READS_ONE_BY_ONE)
/* It may have read the messages of an event that is deleted now. */
#define has(replica) (message[AT(event[me], replica)] || deleted[event[me]])
#else
#define has(replica) \
  (is_in(held[me], replica) || message[AT(event[me], replica)])
#endif

#define num_present (has(0) + has(1) + (N > 2 -> has(N - 1) : 0))

#ifdef WAIT_FOR_ALL
#define is_due (num_present == N)
#else
#define is_due (num_present >= QUORUM)
#endif

#define there_is_a_newer_snapshot \
  ((event[me] < 1 && snapshot_of[1]) || \
   (event[me] < E - 1 && snapshot_of[E - 1]))

/* Agreement._proposed: chooses any quorum of the messages that are there. */
inline choose_list() {
  num_spare = num_present - QUORUM;
  list[me] = EXISTS;
  i = 0;
  do
  :: i == N -> break
  :: i < N && !has(i) -> i++
  :: i < N && has(i) && num_spare > 0 -> num_spare--; i++
  :: i < N && has(i) ->
     list[me] = list[me] | BIT(i);
     if
     :: is_in(held[me], i) -> list[me] = list[me] | (named(held[me], i) & SECOND)
     :: else -> list[me] = list[me] | (message[AT(event[me], i)] & SECOND)
     fi;
     i++
  od;
#ifdef READS_ONE_BY_ONE
  held[me] = held[me] | (list[me] & (BIT(N) - 1));
  if
  :: is_in(list[me], 0) -> held[me] = held[me] | (list[me] & SECOND)
  :: else
  fi;
#endif
  num_spare = 0;
  i = 0
}

/* Inbox.send: creates a message with all units that are held back. */
inline create_message() {
  held_back[me] = held_back[me] | BIT(event[me]);
  if
  :: message[AT(event[me], me)] == 0 ->
     message[AT(event[me], me)] = EXISTS | life;
     if
     :: agreed[event[me]]
     :: agreed[event[me]] == 0 && life == SECOND ->
        units_of_second[event[me]] = held_back[me]
     :: agreed[event[me]] == 0 && life != SECOND ->
        units[AT(event[me], me)] = held_back[me]
     fi
  :: else
  fi;
#ifdef HOLDS_MESSAGES
  held[me] = BIT(me) | (message[AT(event[me], me)] & SECOND)
#endif
}

/* Decisions.decide, first step. */
inline create_proposal() {
#ifndef NO_PROPOSAL
  if
  :: proposal[event[me]] == 0 -> proposal[event[me]] = list[me]
  :: else -> list[me] = proposal[event[me]]
  fi
#else
  skip
#endif
}

/* Decisions.decide, second step. */
inline create_manifest() {
  if
  :: manifest[event[me]] == 0 && !deleted[event[me]] ->
     manifest[event[me]] = list[me]
  :: manifest[event[me]] == 0 && deleted[event[me]] ->
     manifest[event[me]] = list[me] | AFTER_DELETION
  :: manifest[event[me]]
  fi;
  list[me] = manifest[event[me]]
}

/* The messages of a list count from now on. */
inline average() {
  i = 0;
  do
  :: i == N -> break
  :: i < N && !is_in(list[me], i) ->
     units[AT(event[me], i)] = 0;
     i++
  :: i < N && is_in(list[me], i) ->
     if
     :: i == 0 && (list[me] & SECOND) ->
        units[AT(event[me], i)] = units_of_second[event[me]]
     :: else
     fi;
     assert((averaged[i] & units[AT(event[me], i)]) == 0);
     averaged[i] = averaged[i] | units[AT(event[me], i)];
     units[AT(event[me], i)] = 0;
     i++
  od;
  units_of_second[event[me]] = 0;
  i = 0
}

#ifdef NO_REPEAT_CHECK
#define own_work_is_averaged \
  (is_in(list[me], me) && named(list[me], me) == (EXISTS | life))
#else
#define own_work_is_averaged is_in(list[me], me)
#endif

/* Follows a list whose messages are all there. */
inline follow() {
  assert(was_lost || !(list[me] & AFTER_DELETION));
  list[me] = list[me] & ~AFTER_DELETION;
  assert(agreed[event[me]] == 0 || agreed[event[me]] == list[me]);
  if
  :: agreed[event[me]] == 0 -> agreed[event[me]] = list[me]; average()
  :: else
  fi;
  if
  :: own_work_is_averaged -> held_back[me] = 0
  :: else
  fi;
#ifdef LOSS
  objects[me] = list[me];
#endif
  held[me] = 0;
  list[me] = 0;
  event[me]++
}

#define is_held_and_listed(replica) \
  (is_in(held[me], replica) && is_in(list[me], replica) && \
   named(held[me], replica) == named(list[me], replica))

/* Whether a replica has a listed message or can read it. */
#define is_readable(replica) \
  (!is_in(list[me], replica) || is_held_and_listed(replica) || \
   message[AT(event[me], replica)] == named(list[me], replica))
#define all_are_readable \
  (is_readable(0) && is_readable(1) && is_readable(N - 1))

/* Reads the listed messages at once, or waits for them. */
inline follow_if_readable() {
  if
  :: all_are_readable -> follow(); goto next
  :: else -> goto fetch
  fi
}

/* Agreement._look_around: a waiting replica writes again what it has. */
#ifdef KEEP_OTHER_MESSAGE
#define is_lost(an_event, a_list, replica) \
  (is_in(a_list, replica) && message[AT(an_event, replica)] == 0)
#else
#define is_lost(an_event, a_list, replica) \
  (is_in(a_list, replica) && \
   message[AT(an_event, replica)] != named(a_list, replica))
#endif

#if defined(LOSS) && !defined(NO_RESTORE)
/* Objects of the event before. */
#define RESTORE_BEFORE(replica, here) \
  :: atomic { \
       objects[me] && is_lost(event[me] - 1, objects[me], replica) -> \
       message[AT(event[me] - 1, replica)] = named(objects[me], replica); \
       goto here }
#define RESTORE_MANIFEST(here) \
  :: atomic { \
       objects[me] && manifest[event[me] - 1] == 0 -> \
       manifest[event[me] - 1] = objects[me]; \
       if \
       :: deleted[event[me] - 1] -> \
          manifest[event[me] - 1] = objects[me] | AFTER_DELETION \
       :: else \
       fi; \
       goto here }
/* Messages of this event before there is a manifest. */
#define RESTORE_HELD(replica) \
  :: atomic { \
       is_in(held[me], replica) && message[AT(event[me], replica)] == 0 -> \
       message[AT(event[me], replica)] = named(held[me], replica); \
       goto wait }
/* Messages of this event that are in the manifest. */
#define RESTORE_LISTED(replica) \
  :: atomic { \
       is_held_and_listed(replica) && \
       is_lost(event[me], list[me], replica) -> \
       message[AT(event[me], replica)] = named(list[me], replica); \
       goto fetch }
#else
#define RESTORE_BEFORE(replica, here)
#define RESTORE_MANIFEST(here)
#define RESTORE_HELD(replica)
#define RESTORE_LISTED(replica)
#endif

#ifdef SNAPSHOTS
#define TAKE_NEWER_SNAPSHOT \
  :: atomic { there_is_a_newer_snapshot -> goto stale }
#else
#define TAKE_NEWER_SNAPSHOT
#endif

#define KILLED :: atomic { may_be_killed && me == 0 -> goto killed }

/* A checkpoint may be written before any event. */
inline save_perhaps() {
  if
  :: may_be_killed && me == 0 ->
     saved_event = event[me];
     saved_held_back = held_back[me]
  :: true
  fi
}

proctype replica(byte me) {
  byte life = 0, i = 0, num_spare = 0, newest = 0;
  byte saved_event = 0, saved_held_back = 0;

start:  /* Mailbox.newest: the newest whole snapshot, or the first state */
#ifdef SNAPSHOTS
  if
  KILLED
  :: atomic { true ->
       newest = E - 1;
       do
       :: newest > 0 && !snapshot_of[newest] -> newest--
       :: else -> break
       od
     }
  fi;
  if
  KILLED
  /* It was deleted meanwhile, since there is a newer one. */
  :: atomic { newest > 0 && !snapshot_of[newest] -> newest = 0; goto start }
  :: atomic { newest > 0 && snapshot_of[newest] ->
       event[me] = newest;
       newest = 0
     }
  /* There was none when it looked, so it begins with event 0. If that event
     was deleted meanwhile, there is a snapshot now: it looks again. */
  :: atomic { newest == 0 && !gone[0] && !gone_copy[0] -> event[me] = 0 }
  :: atomic { newest == 0 && (gone[0] || gone_copy[0]) ->
#ifdef NO_SECOND_LOOK
       assert(false)
#else
       assert(snapshot_of[1] || snapshot_of[E - 1]);
       goto start
#endif
     }
  fi;
#else
  event[me] = 0;
#endif

next:  /* a checkpoint, Mailbox.announce, the inner steps, and Inbox.send */
  if
  KILLED
  :: atomic { event[me] == E -> goto finished }
  :: atomic { event[me] < E && manifest[event[me]] -> save_perhaps() }
  :: atomic { event[me] < E && gone[event[me]] -> goto stale }
  :: atomic { event[me] < E -> save_perhaps(); create_message() }
#ifdef LATE_WRITES
  :: atomic { event[me] < E && may_be_killed && me == 0 ->
       save_perhaps();
       late_message = held_back[me] | BIT(event[me]);
       late_event = event[me];
       goto killed
     }
#endif
  fi;

wait:  /* Agreement._decided waits for the manifest, or until it is due */
  if
  KILLED
  TAKE_NEWER_SNAPSHOT
  RESTORE_BEFORE(0, wait)
  RESTORE_BEFORE(1, wait)
  RESTORE_MANIFEST(wait)
  RESTORE_HELD(0)
  RESTORE_HELD(1)
#if N > 2
  RESTORE_BEFORE(2, wait)
  RESTORE_HELD(2)
#endif
#ifdef READS_ONE_BY_ONE
  :: atomic { manifest[event[me]] -> list[me] = manifest[event[me]]; goto read }
  :: atomic { is_due -> choose_list() }
#else
#ifdef SNAPSHOTS
  :: atomic { manifest[event[me]] -> list[me] = manifest[event[me]]; goto read }
#else
  :: atomic { manifest[event[me]] ->
       list[me] = manifest[event[me]];
       follow_if_readable()
     }
#endif
  :: atomic { is_due -> choose_list(); create_proposal(); goto check }
#endif
#ifdef LATE_WRITES
  :: atomic { is_due && may_be_killed && me == 0 ->
       choose_list();
       late_proposal = list[me];
       late_event = event[me];
       goto killed
     }
#endif
  fi;

#ifdef READS_ONE_BY_ONE
  /* Decisions.decide, first step */
  if
  KILLED
  :: atomic { true -> create_proposal() }
  fi;
#endif

check:  /* Agreement._decided: the function that Decisions.decide calls */
#if defined(SNAPSHOTS) && !defined(NO_CHECK_BEFORE_DECISION)
  if
  KILLED
  :: atomic { gone[event[me]] || gone_copy[event[me]] -> goto stale }
  :: atomic { !gone[event[me]] && !gone_copy[event[me]] }
  fi;
#endif

  /* Decisions.decide, second step */
  if
  KILLED
#if defined(READS_ONE_BY_ONE) || defined(SNAPSHOTS)
  :: atomic { true -> create_manifest() }
#else
  :: atomic { true -> create_manifest(); follow_if_readable() }
#endif
  fi;

read:  /* Agreement.wait_for_manifest looks for the first mark */
#if defined(SNAPSHOTS) && !defined(NO_CHECK_AFTER_MANIFEST)
  if
  KILLED
  :: atomic { gone[event[me]] -> goto stale }
#ifdef READS_ONE_BY_ONE
  :: atomic { !gone[event[me]] }
#else
  :: atomic { !gone[event[me]] -> follow_if_readable() }
#endif
  fi;
#endif

fetch:  /* Agreement.fetch_messages */
  if
  KILLED
  TAKE_NEWER_SNAPSHOT
  RESTORE_BEFORE(0, fetch)
  RESTORE_BEFORE(1, fetch)
  RESTORE_MANIFEST(fetch)
  RESTORE_LISTED(0)
  RESTORE_LISTED(1)
#if N > 2
  RESTORE_BEFORE(2, fetch)
  RESTORE_LISTED(2)
#endif
  :: atomic { all_are_readable -> follow(); goto next }
  fi;

stale:  /* ReplicaStaleError: what was held back is dropped */
  atomic {
    held_back[me] = 0;
    held[me] = 0;
    list[me] = 0;
    objects[me] = 0;
    goto start
  };

killed:
#ifdef KILL
  atomic {
    may_be_killed = false;
    life = SECOND;
    held_back[me] = 0;
    held[me] = 0;
    list[me] = 0;
    objects[me] = 0;
    newest = 0;
    if
    :: true ->
       event[me] = saved_event;
       held_back[me] = saved_held_back;
       saved_event = 0;
       saved_held_back = 0;
       goto next
    :: true ->
       saved_event = 0;
       saved_held_back = 0;
       goto start
#if N > QUORUM
    :: true -> skip
#endif
    fi
  };
#endif

finished:
  atomic {
    objects[me] = 0;
    has_ended[me] = true;
    life = 0;
    saved_event = 0;
    saved_held_back = 0
  }
}

#ifdef SNAPSHOTS
/* Snapshots.write: writes the snapshot before an event, and deletes what is
   older than the oldest snapshot that is kept. A replica that dies stops
   between two requests, and so may its writer. Blocks are independent, so one
   statement does the same to each of them. */
#define EACH_DELETED(statement) \
  number = 0; \
  do \
  :: number < end -> statement; number++ \
  :: else -> break \
  od; \
  number = 0
#define STOPS :: atomic { true -> goto stopped }

proctype writer(byte at) {
  byte number = 0, end = 0;
  if
  STOPS
  :: atomic { agreed[at] ->
       snapshot_of[at] = true;
       end = at;
#if KEPT == 2
       end--;
       do
       :: end > 0 && !snapshot_of[end] -> end--
       :: else -> break
       od;
#endif
       if
       :: end == 0 -> goto stopped
       :: else
       fi
     }
  fi;
#if !defined(NO_DELETION_MARK) && !defined(MARK_AFTER_DELETION)
  if
  STOPS
  :: atomic { true -> EACH_DELETED(gone[number] = true) }
  fi;
#ifndef ONE_MARK
  if
  STOPS
  :: atomic { true -> EACH_DELETED(gone_copy[number] = true) }
  fi;
#endif
#endif
  if
  STOPS
  :: atomic { true ->
       EACH_DELETED(
         deleted[number] = true;
         message[AT(number, 0)] = 0;
         message[AT(number, 1)] = 0;
         message[AT(number, N - 1)] = 0)
     }
  fi;
  if
  STOPS
  :: atomic { true -> EACH_DELETED(proposal[number] = 0) }
  fi;
  if
  STOPS
  :: atomic { true -> EACH_DELETED(manifest[number] = 0) }
  fi;
  if
  STOPS
  :: atomic { true -> EACH_DELETED(snapshot_of[number] = false) }
  fi;
#ifdef MARK_AFTER_DELETION
  if
  STOPS
  :: atomic { true -> EACH_DELETED(gone[number] = true) }
  fi;
  if
  STOPS
  :: atomic { true -> EACH_DELETED(gone_copy[number] = true) }
  fi;
#endif
stopped:
  atomic {
    number = 0;
    end = 0
  }
}
#endif

#ifdef LATE_WRITES
/* Brings what replica 0 had sent when it was killed. */
proctype network() {
end_of_writes:
  if
  :: atomic { late_message ->
       if
       :: message[AT(late_event, 0)] == 0 ->
          message[AT(late_event, 0)] = EXISTS;
          if
          :: agreed[late_event] == 0 -> units[AT(late_event, 0)] = late_message
          :: else
          fi
       :: else
       fi;
       late_message = 0;
       late_event = 0
     }
  :: atomic { late_proposal ->
       if
       :: proposal[late_event] == 0 -> proposal[late_event] = late_proposal
       :: else
       fi;
       late_proposal = 0;
       late_event = 0
     }
  fi
}
#endif

#ifdef LOSS
/* A stranger who deletes one object. */
#define LOSE(object) \
  :: atomic { object && !was_lost -> object = 0; was_lost = true }

#ifdef MESSAGES_LOST
/* Every replica that waits at the event may have read the message before. */
#define LOSE_MESSAGE(number, sender) \
  :: atomic { \
       message[AT(number, sender)] && !was_lost -> \
       READ_PERHAPS(0, number, sender); \
       READ_PERHAPS(1, number, sender); \
       READ_PERHAPS(N - 1, number, sender); \
       message[AT(number, sender)] = 0; \
       was_lost = true }
#ifdef READS_ONE_BY_ONE
#define READ_PERHAPS(reader, number, sender) skip
#else
#define READ_PERHAPS(reader, number, sender) \
  if \
  :: held[reader] && event[reader] == number && \
     !is_in(held[reader], sender) -> \
     held[reader] = held[reader] | BIT(sender) | \
       (message[AT(number, sender)] & SECOND) \
  :: true \
  fi
#endif
#define LOSE_MESSAGES(number) \
  LOSE_MESSAGE(number, 0) \
  LOSE_MESSAGE(number, 1) \
  LOSE_MESSAGE(number, N - 1)
#else
#define LOSE_MESSAGES(number)
#endif

#ifdef LISTS_LOST
#define LOSE_LISTS(number) \
  LOSE(proposal[number]) \
  LOSE(manifest[number])
#else
#define LOSE_LISTS(number)
#endif

#ifdef MARKS_LOST
#define LOSE_MARKS(number) \
  LOSE(gone[number]) \
  LOSE(gone_copy[number])
#else
#define LOSE_MARKS(number)
#endif

#ifdef SNAPSHOTS_LOST
#define LOSE_SNAPSHOTS(number) LOSE(snapshot_of[number])
#else
#define LOSE_SNAPSHOTS(number)
#endif

#define LOSE_OF_EVENT(number) \
  LOSE_MESSAGES(number) \
  LOSE_LISTS(number) \
  LOSE_MARKS(number) \
  LOSE_SNAPSHOTS(number)

proctype stranger() {
end_of_loss:
  if
  LOSE_OF_EVENT(0)
  LOSE_OF_EVENT(1)
#if E > 2
  LOSE_OF_EVENT(2)
#endif
  fi
}
#endif

/* A listed message is missing, and no replica that has read it can write it
   again: all have died, or have gone on by more than one event. */
inline look_for_a_lost_message() {
  waiting = 0;
  do
  :: waiting == N -> break
  :: waiting < N ->
     sender = 0;
     do
     :: sender == N -> break
     :: sender < N ->
        if
        :: !has_ended[waiting] && is_in(list[waiting], sender) &&
           message[AT(event[waiting], sender)] !=
             named(list[waiting], sender) ->
           a_person_is_needed = true;
           holder = 0;
           do
           :: holder == N -> break
           :: holder < N ->
              if
              :: !has_ended[holder] && event[holder] == event[waiting] + 1 &&
                 is_in(objects[holder], sender) -> a_person_is_needed = false
              :: !has_ended[holder] && event[holder] == event[waiting] &&
                 is_in(held[holder], sender) &&
                 named(held[holder], sender) ==
                   named(list[waiting], sender) -> a_person_is_needed = false
              :: else
              fi;
              holder++
           od
        :: else
        fi;
        if
        :: a_person_is_needed -> break
        :: else
        fi;
        sender++
     od;
     if
     :: a_person_is_needed -> break
     :: else
     fi;
     waiting++
  od
}

proctype observer() {
  byte waiting, sender, holder;
  bool a_person_is_needed = false;
  atomic {
    timeout ->
#ifdef LOSS
    look_for_a_lost_message();
#endif
    assert(a_person_is_needed ||
           (has_ended[0] && has_ended[1] && has_ended[N - 1]))
  }
}

init {
  atomic {
    run replica(0);
    run replica(1);
#if N > 2
    run replica(2);
#endif
#ifdef SNAPSHOTS
#if !defined(ONE_SNAPSHOT) || E == 2
    run writer(1);
#endif
#if E > 2
    run writer(2);
#endif
#endif
#ifdef LATE_WRITES
    run network();
#endif
#ifdef LOSS
    run stranger();
#endif
    run observer()
  }
}
