//! A link: numbered frames in order, each exactly once, over connections that may break.
//!
//! What is sent is kept until the peer has acknowledged it; after a new connection both sides say what they have
//! received, and the rest is sent again. A sender stays within the window that the receiver grants, so a slow receiver
//! bounds the memory of both.

use super::frame::{self, Frame, HEAD};
use super::{Message, ProtocolError};
use kiln_device::Bytes;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Bytes that may be on their way unacknowledged when a session starts, and that a receiver lets pile up at most.
pub const WINDOW: u64 = 8 << 20;
/// Received bytes after which an acknowledgement is due at once.
const ACK_BYTES: u64 = WINDOW / 8;
/// Received frames after which it is.
const ACK_FRAMES: u64 = 64;

/// A payload: encoded fields, then shared bytes that are not copied.
#[derive(Clone, Debug)]
pub struct Body {
    /// What the message says.
    pub fields: Vec<u8>,
    /// What it carries.
    pub data: Option<Bytes>,
    /// What it carries that is read only when it is sent.
    pub later: Option<Part>,
}

/// Bytes that are not in memory.
pub trait Stored: Send + Sync {
    /// So many bytes from there.
    fn read(&self, at: u64, len: usize) -> io::Result<Vec<u8>>;
}

/// Some of them.
#[derive(Clone)]
pub struct Part {
    /// Where they are.
    pub stored: Arc<dyn Stored>,
    /// The first.
    pub at: u64,
    /// How many there are.
    pub len: usize,
}

impl Part {
    /// Reads them.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        self.stored.read(self.at, self.len)
    }
}

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes stored from {}", self.len, self.at)
    }
}

impl Body {
    fn data(&self) -> &[u8] {
        self.data.as_deref().unwrap_or(&[])
    }

    fn len(&self) -> u64 {
        let later = self.later.as_ref().map_or(0, |part| part.len);
        (HEAD + self.fields.len() + self.data().len() + later) as u64
    }
}

/// Which frames go first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lane {
    /// Ahead of everything and outside the window: the receiver has room for it already.
    Urgent,
    /// In order.
    Normal,
    /// When nothing else waits.
    Background,
}

#[derive(Debug)]
struct Outgoing {
    kind: u8,
    lane: Lane,
    body: Body,
}

impl Outgoing {
    /// Bytes of the window that it takes.
    fn cost(&self) -> u64 {
        if self.lane == Lane::Urgent { 0 } else { self.body.len() }
    }
}

/// A frame to be sent. Its checksum is computed when it is written, outside of any lock.
pub struct Out {
    seq: u64,
    kind: u8,
    /// Its payload.
    pub body: Body,
}

/// Data up to this size are copied next to the frames around them; longer ones go from where they are.
const COPIED: usize = 4096;

impl Out {
    /// A frame outside of any link, which is neither numbered nor sent again.
    pub fn control(kind: u8, body: Body) -> Out {
        Out { seq: 0, kind, body }
    }

    /// Bytes on the wire.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.body.len() as usize
    }

    /// Reads what is not in memory. It must have been before the frame is written.
    pub fn load(&mut self) -> io::Result<()> {
        if let Some(part) = &self.body.later {
            self.body.data = Some(Bytes::new(part.read()?));
            self.body.later = None;
        }
        Ok(())
    }

    /// The frame's head.
    pub fn head(&self) -> [u8; HEAD] {
        frame::head(self.seq, self.kind, [&self.body.fields, self.body.data()])
    }

    /// Appends the frame to a buffer, except for long data, which are to be sent after it.
    pub fn append(self, buffer: &mut Vec<u8>) -> Option<Bytes> {
        buffer.extend_from_slice(&self.head());
        buffer.extend_from_slice(&self.body.fields);
        let data = self.body.data?;
        if data.len() > COPIED {
            return Some(data);
        }
        buffer.extend_from_slice(&data);
        None
    }
}

/// One direction's sender and the other's receiver.
#[derive(Debug)]
pub struct Link {
    /// Frames that were never sent, by lane. A frame gets its number when it is first sent.
    waiting: [VecDeque<Outgoing>; 3],
    /// Frames from `acked + 1` on that were sent; the first `flying` of them on this connection.
    unacked: VecDeque<Outgoing>,
    flying: usize,
    acked: u64,
    /// Bytes of the window taken by all frames that were ever sent.
    spent: u64,
    queued: u64,
    /// Bytes that the peer lets this side send since the start of the session.
    limit: u64,
    /// The last frame received in order, and the bytes of the window that all of them took.
    received: u64,
    taken: u64,
    /// Bytes that have been used up and so make room again.
    released: u64,
    /// What the peer was last told.
    told: (u64, u64),
    counts: Counts,
}

/// What has gone over a link, heads included.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Numbered frames sent, those sent again included.
    pub sent_frames: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Numbered frames received, without those that came twice.
    pub received_frames: u64,
    /// Their bytes.
    pub received_bytes: u64,
}

impl Default for Link {
    fn default() -> Link {
        Link {
            waiting: Default::default(),
            unacked: VecDeque::new(),
            flying: 0,
            acked: 0,
            spent: 0,
            queued: 0,
            limit: WINDOW,
            received: 0,
            taken: 0,
            released: 0,
            told: (0, WINDOW),
            counts: Counts::default(),
        }
    }
}

impl Link {
    /// Queues a message.
    pub fn send(&mut self, lane: Lane, kind: u8, body: Body) {
        debug_assert!(body.len() <= (HEAD + frame::MOST) as u64);
        self.queued += body.len();
        self.waiting[lane as usize].push_back(Outgoing { kind, lane, body });
    }

    /// Bytes that wait or are not acknowledged.
    pub fn queued_bytes(&self) -> u64 {
        self.queued
    }

    /// Frames that wait or are not acknowledged.
    pub fn queued_frames(&self) -> usize {
        self.unacked.len() + self.waiting.iter().map(VecDeque::len).sum::<usize>()
    }

    /// What has gone over it.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The next frame that may be sent now.
    pub fn next(&mut self) -> Option<Out> {
        if self.flying == self.unacked.len() {
            let lane = self.waiting.iter().position(|lane| !lane.is_empty())?;
            // A frame that passes the limit goes if the limit is not reached yet, lest a long one wait forever.
            if lane != Lane::Urgent as usize && self.spent >= self.limit {
                return None;
            }
            let next = self.waiting[lane].pop_front()?;
            self.spent += next.cost();
            self.unacked.push_back(next);
        }
        let frame = &self.unacked[self.flying];
        self.flying += 1;
        self.counts.sent_frames += 1;
        self.counts.sent_bytes += frame.body.len();
        let seq = self.acked + self.flying as u64;
        Some(Out { seq, kind: frame.kind, body: frame.body.clone() })
    }

    /// Takes a numbered frame, of the sender's `lane`. False for one that came before: it is dropped.
    pub fn accept(&mut self, frame: &Frame<'_>, lane: Lane) -> Result<bool, ProtocolError> {
        if frame.seq <= self.received {
            return Ok(false);
        }
        let want = self.received + 1;
        if frame.seq != want {
            return Err(ProtocolError::Gap { got: frame.seq, want });
        }
        let len = (HEAD + frame.payload.len()) as u64;
        if lane != Lane::Urgent {
            if self.taken >= self.released + WINDOW {
                return Err(ProtocolError::Window);
            }
            self.taken += len;
        }
        self.received = want;
        self.counts.received_frames += 1;
        self.counts.received_bytes += len;
        Ok(true)
    }

    /// A received frame that took room is used up: `len` is that of its payload.
    pub fn release(&mut self, len: usize) {
        self.released += (HEAD + len) as u64;
    }

    /// The peer acknowledges.
    pub fn acknowledged(&mut self, seq: u64, limit: u64) -> Result<(), ProtocolError> {
        let sent = self.acked + self.unacked.len() as u64;
        if seq > sent {
            return Err(ProtocolError::Ack { got: seq, sent });
        }
        while self.acked < seq {
            if let Some(done) = self.unacked.pop_front() {
                self.queued -= done.body.len();
                self.flying = self.flying.saturating_sub(1);
            }
            self.acked += 1;
        }
        // An acknowledgement may be overtaken by a newer one: a window never shrinks.
        self.limit = self.limit.max(limit);
        Ok(())
    }

    /// The acknowledgement to send, if there is news; if not `soon`, only when enough has come.
    pub fn acknowledge(&mut self, soon: bool) -> Option<Message<'static>> {
        let now = (self.received, self.released + WINDOW);
        let urgent = now.1 - self.told.1 >= ACK_BYTES || now.0 - self.told.0 >= ACK_FRAMES;
        if !self.owes() || !(soon || urgent) {
            return None;
        }
        self.told = now;
        Some(Message::Ack { seq: now.0, limit: now.1 })
    }

    /// Whether there is news to acknowledge.
    pub fn owes(&self) -> bool {
        (self.received, self.released + WINDOW) != self.told
    }

    /// The last frame received in order.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// A new connection: the peer has received everything up to `seq`, the rest is sent again.
    pub fn resume(&mut self, seq: u64) -> Result<(), ProtocolError> {
        if seq < self.acked {
            return Err(ProtocolError::Ack { got: seq, sent: self.acked });
        }
        self.acknowledged(seq, 0)?;
        self.flying = 0;
        // The last acknowledgement may have been lost.
        self.told = (0, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::Decoder;
    use super::*;

    fn body(len: usize) -> Body {
        Body { fields: vec![1], data: Some(Bytes::new(vec![7u8; len])), later: None }
    }

    fn bytes(out: Out) -> Vec<u8> {
        [&out.head()[..], &out.body.fields, out.body.data()].concat()
    }

    /// Sends what may be sent, through `loss` which decides what arrives; gives the payload lengths that were accepted.
    fn pass(from: &mut Link, to: &mut Link, mut loss: impl FnMut() -> bool) -> Vec<usize> {
        let mut got = Vec::new();
        let mut decoder = Decoder::default();
        while let Some(out) = from.next() {
            if loss() {
                break;
            }
            decoder.feed(&bytes(out));
            let frame = decoder.next().unwrap().unwrap();
            if to.accept(&frame, Lane::Normal).unwrap() {
                got.push(frame.payload.len());
            }
        }
        got
    }

    #[test]
    fn a_broken_connection_loses_and_repeats_nothing() {
        let (mut a, mut b) = (Link::default(), Link::default());
        let mut state = 1u64;
        let mut random = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            state >> 33
        };
        let mut got = Vec::new();
        for i in 0..500 {
            a.send(Lane::Normal, 20, body(i));
            let cut = random() % 4 == 0;
            let arrived = pass(&mut a, &mut b, || cut && random() % 3 == 0);
            arrived.iter().for_each(|&len| b.release(len));
            got.extend(arrived);
            if cut {
                a.resume(b.received()).unwrap();
            } else if let Some(Message::Ack { seq, limit }) = b.acknowledge(random() % 2 == 0) {
                a.acknowledged(seq, limit).unwrap();
            }
        }
        a.resume(b.received()).unwrap();
        got.extend(pass(&mut a, &mut b, || false));
        assert_eq!(got, (1..=500).collect::<Vec<_>>());
    }

    #[test]
    fn a_slow_receiver_bounds_what_is_sent() {
        let (mut a, mut b) = (Link::default(), Link::default());
        for _ in 0..100 {
            a.send(Lane::Normal, 20, body(frame::MOST - 1));
        }
        let first = pass(&mut a, &mut b, || false);
        assert_eq!(first.len(), 8);
        a.send(Lane::Urgent, 20, body(5));
        let mut decoder = Decoder::default();
        decoder.feed(&bytes(a.next().expect("urgent frames need no window")));
        assert!(b.accept(&decoder.next().unwrap().unwrap(), Lane::Urgent).unwrap());
        assert!(a.next().is_none());
        b.release(first[0]);
        let Some(Message::Ack { seq, limit }) = b.acknowledge(true) else { panic!("news") };
        a.acknowledged(seq, limit).unwrap();
        assert_eq!(pass(&mut a, &mut b, || false).len(), 1);
    }

    #[test]
    fn a_sender_that_ignores_the_window_is_found_out() {
        let mut b = Link::default();
        let payload = vec![0; frame::MOST];
        let sent = (1..)
            .take_while(|&seq| b.accept(&Frame { seq, kind: 20, payload: &payload }, Lane::Normal).is_ok());
        assert_eq!(sent.count(), 8);
    }

    #[test]
    fn gaps_and_false_acknowledgements_are_refused() {
        let mut a = Link::default();
        let gap = a.accept(&Frame { seq: 2, kind: 20, payload: &[] }, Lane::Normal);
        assert_eq!(gap, Err(ProtocolError::Gap { got: 2, want: 1 }));
        assert_eq!(a.acknowledged(1, 0), Err(ProtocolError::Ack { got: 1, sent: 0 }));
    }

    #[test]
    fn background_waits_for_everything_else() {
        let mut a = Link::default();
        a.send(Lane::Background, 1, body(1));
        a.send(Lane::Normal, 2, body(1));
        a.send(Lane::Urgent, 3, body(1));
        let kinds: Vec<u8> = std::iter::from_fn(|| a.next()).map(|out| out.kind).collect();
        assert_eq!(kinds, [3, 2, 1]);
    }
}
