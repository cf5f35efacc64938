//! A link: numbered frames in order, each exactly once, over connections that may break.
//!
//! What is sent is kept until the peer has acknowledged it; after a new connection both sides say what they have
//! received, and the rest is sent again. A sender stays within the window that the receiver grants, so a slow receiver
//! bounds the memory of both.

use super::frame::{self, Frame, HEAD};
use super::{Message, ProtocolError, message};
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
pub enum Priority {
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
    lane: Priority,
    body: Body,
}

impl Outgoing {
    /// Bytes of the window that it takes.
    fn cost(&self) -> u64 {
        if self.lane == Priority::Urgent { 0 } else { self.body.len() }
    }

    /// Bytes of memory that it takes, besides data that it shares with others.
    fn own(&self) -> u64 {
        OWN + self.body.fields.len() as u64
    }
}

/// What keeping a frame takes, besides its bytes.
const OWN: u64 = 192;

/// What waits in a lane.
#[derive(Debug)]
enum Waiting {
    Frame(Outgoing),
    Content(Content),
}

impl Waiting {
    /// Bytes of memory that it takes, besides what it shares with others.
    fn own(&self) -> u64 {
        match self {
            Waiting::Frame(frame) => frame.own(),
            Waiting::Content(_) => OWN,
        }
    }
}

/// The content of a value, cut into pieces when their turn comes: what waits takes no memory of its own.
#[derive(Debug)]
struct Content {
    of: u64,
    data: Bytes,
    /// Where the next piece begins.
    at: usize,
    /// Pieces are compressed before they go.
    compress: bool,
    packed: Option<(u8, Body)>,
}

impl Content {
    fn piece(&self) -> (u8, Body) {
        let end = (self.at + message::PIECE).min(self.data.len());
        message::piece(self.of, self.data.slice(self.at..end))
    }
}

/// A piece that is to be compressed before it goes. That takes a while: it is done without the link.
pub struct Packing {
    lane: usize,
    of: u64,
    at: usize,
    frame: (u8, Body),
}

impl Packing {
    /// Compresses it.
    pub fn pack(mut self) -> Packing {
        let (kind, body) = self.frame;
        self.frame = message::compressed(kind, body);
        self
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

    /// All of it, for transports that send one buffer.
    pub fn bytes(mut self) -> io::Result<Vec<u8>> {
        self.load()?;
        let Body { fields, data, .. } = &self.body;
        Ok([&self.head()[..], fields, data.as_deref().unwrap_or(&[])].concat())
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
    waiting: [VecDeque<Waiting>; 3],
    /// Frames from `acked + 1` on that were sent; the first `flying` of them on this connection.
    unacked: VecDeque<Outgoing>,
    flying: usize,
    acked: u64,
    /// Bytes of the window taken by all frames that were ever sent.
    spent: u64,
    /// Those of frames that were acknowledged.
    settled: u64,
    queued: u64,
    /// Bytes of memory that what is queued takes by itself.
    own: u64,
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
            settled: 0,
            queued: 0,
            own: 0,
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
    pub fn send(&mut self, lane: Priority, kind: u8, body: Body) {
        debug_assert!(body.len() <= (HEAD + frame::MOST) as u64);
        self.queued += body.len();
        self.wait(lane, Waiting::Frame(Outgoing { kind, lane, body }));
    }

    /// Queues the content of a value, whose pieces belong to `of`.
    pub fn send_content(&mut self, lane: Priority, of: u64, data: Bytes, compress: bool) {
        if data.is_empty() {
            return;
        }
        self.queued += data.len() as u64;
        self.wait(lane, Waiting::Content(Content { of, data, at: 0, compress, packed: None }));
    }

    fn wait(&mut self, lane: Priority, waiting: Waiting) {
        self.own += waiting.own();
        self.waiting[lane as usize].push_back(waiting);
    }

    /// Bytes of memory that what waits or is not acknowledged takes, besides data that it shares with others.
    pub fn own_bytes(&self) -> u64 {
        self.own
    }

    /// The next piece that is to be compressed before it goes, if that is what comes next.
    pub fn packing(&self) -> Option<Packing> {
        let lane = self.next_lane()?;
        match self.waiting[lane].front()? {
            Waiting::Content(content) if content.compress && content.packed.is_none() => {
                Some(Packing { lane, of: content.of, at: content.at, frame: content.piece() })
            }
            _ => None,
        }
    }

    /// A piece is compressed.
    pub fn packed(&mut self, packing: Packing) {
        if let Some(Waiting::Content(content)) = self.waiting[packing.lane].front_mut()
            && (content.of, content.at) == (packing.of, packing.at)
        {
            content.packed = Some(packing.frame);
        }
    }

    /// The lane whose frame goes next, if one may that was not sent before.
    fn next_lane(&self) -> Option<usize> {
        if self.flying < self.unacked.len() {
            return None;
        }
        let lane = self.waiting.iter().position(|lane| !lane.is_empty())?;
        // A frame that passes the limit goes if the limit is not reached yet, lest a long one wait forever.
        (lane == Priority::Urgent as usize || self.spent < self.limit).then_some(lane)
    }

    /// Takes the next frame of a lane, if it is ready.
    fn take(&mut self, lane: usize) -> Option<Outgoing> {
        let queue = &mut self.waiting[lane];
        let outgoing = match queue.front_mut()? {
            Waiting::Frame(_) => match queue.pop_front()? {
                Waiting::Frame(frame) => return Some(frame),
                Waiting::Content(_) => return None,
            },
            Waiting::Content(content) => {
                let (kind, body) = match content.packed.take() {
                    Some(packed) => packed,
                    None if content.compress => return None,
                    None => content.piece(),
                };
                let end = (content.at + message::PIECE).min(content.data.len());
                self.queued = self.queued - (end - content.at) as u64 + body.len();
                content.at = end;
                let lane = [Priority::Urgent, Priority::Normal, Priority::Background][lane];
                let outgoing = Outgoing { kind, lane, body };
                self.own += outgoing.own();
                if content.at == content.data.len() {
                    self.own -= OWN;
                    queue.pop_front();
                }
                outgoing
            }
        };
        Some(outgoing)
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
            let next = self.next_lane().and_then(|lane| self.take(lane))?;
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
    pub fn accept(&mut self, frame: &Frame<'_>, lane: Priority) -> Result<bool, ProtocolError> {
        self.accept_as(frame, frame.payload.len(), lane)
    }

    /// The same for a frame whose payload was `len` bytes on its way.
    pub fn accept_as(
        &mut self,
        frame: &Frame<'_>,
        len: usize,
        lane: Priority,
    ) -> Result<bool, ProtocolError> {
        if frame.seq <= self.received {
            return Ok(false);
        }
        let want = self.received + 1;
        if frame.seq != want {
            return Err(ProtocolError::Gap { got: frame.seq, want });
        }
        let len = (HEAD + len) as u64;
        if lane != Priority::Urgent {
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
                self.own -= done.own();
                self.settled += done.cost();
                self.flying = self.flying.saturating_sub(1);
            }
            self.acked += 1;
        }
        // An acknowledgement may be overtaken by a newer one: a window never shrinks. Who grants more than a window beyond
        // what it has taken would have all of it kept here.
        self.limit = self.limit.max(limit.min(self.settled + WINDOW));
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

    /// Sends what may be sent, through `loss` which decides what arrives; gives the payload lengths that were accepted.
    fn pass(from: &mut Link, to: &mut Link, mut loss: impl FnMut() -> bool) -> Vec<usize> {
        let mut got = Vec::new();
        let mut decoder = Decoder::default();
        while let Some(out) = from.next() {
            if loss() {
                break;
            }
            decoder.feed(&out.bytes().unwrap());
            let frame = decoder.next().unwrap().unwrap();
            if to.accept(&frame, Priority::Normal).unwrap() {
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
            a.send(Priority::Normal, 20, body(i));
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
            a.send(Priority::Normal, 20, body(frame::MOST - 1));
        }
        let first = pass(&mut a, &mut b, || false);
        assert_eq!(first.len(), 8);
        a.send(Priority::Urgent, 20, body(5));
        let mut decoder = Decoder::default();
        decoder.feed(&a.next().expect("urgent frames need no window").bytes().unwrap());
        assert!(b.accept(&decoder.next().unwrap().unwrap(), Priority::Urgent).unwrap());
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
        let sent = (1..).take_while(|&seq| {
            b.accept(&Frame { seq, kind: 20, payload: &payload }, Priority::Normal).is_ok()
        });
        assert_eq!(sent.count(), 8);
    }

    #[test]
    fn gaps_and_false_acknowledgements_are_refused() {
        let mut a = Link::default();
        let gap = a.accept(&Frame { seq: 2, kind: 20, payload: &[] }, Priority::Normal);
        assert_eq!(gap, Err(ProtocolError::Gap { got: 2, want: 1 }));
        assert_eq!(a.acknowledged(1, 0), Err(ProtocolError::Ack { got: 1, sent: 0 }));
    }

    #[test]
    fn an_answer_that_waits_is_cut_when_its_turn_comes() {
        let data = Bytes::new(vec![7u8; 64 << 20]);
        for compress in [false, true] {
            let (mut a, mut b) = (Link::default(), Link::default());
            for of in 0..1000 {
                a.send_content(Priority::Normal, of, data.clone(), compress);
            }
            assert_eq!(a.queued_bytes(), 1000 * (64 << 20));
            assert!(a.own_bytes() < 1000 * 300, "{} bytes for what is not cut yet", a.own_bytes());
            let mut got = 0;
            let mut decoder = Decoder::default();
            while got < 65 << 20 {
                if let Some(packing) = a.packing() {
                    assert!(a.next().is_none(), "not before it is compressed");
                    a.packed(packing.pack());
                }
                let Some(out) = a.next() else {
                    let Some(Message::Ack { seq, limit }) = b.acknowledge(true) else { panic!("no window") };
                    a.acknowledged(seq, limit).unwrap();
                    continue;
                };
                decoder.feed(&out.bytes().unwrap());
                let frame = decoder.next().unwrap().unwrap();
                assert!(b.accept(&frame, Priority::Normal).unwrap());
                let mut scratch = Vec::new();
                match Message::decode(frame.kind, frame.payload, &mut scratch).unwrap() {
                    Message::Piece { of, bytes } => {
                        assert_eq!(of, (got >> 26) as u64);
                        got += bytes.len();
                    }
                    other => panic!("{other:?}"),
                }
                b.release(frame.payload.len());
            }
            let Some(Message::Ack { seq, limit }) = b.acknowledge(true) else { panic!("news") };
            a.acknowledged(seq, limit).unwrap();
            assert!(a.own_bytes() < 1000 * 300);
        }
    }

    #[test]
    fn a_window_that_is_granted_without_an_acknowledgement_is_not_believed() {
        let mut a = Link::default();
        a.send_content(Priority::Normal, 1, Bytes::new(vec![7u8; 256 << 20]), false);
        let mut sent = 0;
        for _ in 0..1000 {
            a.acknowledged(0, u64::MAX).unwrap();
            sent += std::iter::from_fn(|| a.next()).count();
        }
        assert!(sent * message::PIECE <= 2 * WINDOW as usize, "{sent} pieces are kept");
    }

    #[test]
    fn background_waits_for_everything_else() {
        let mut a = Link::default();
        a.send(Priority::Background, 1, body(1));
        a.send(Priority::Normal, 2, body(1));
        a.send(Priority::Urgent, 3, body(1));
        let kinds: Vec<u8> = std::iter::from_fn(|| a.next()).map(|out| out.kind).collect();
        assert_eq!(kinds, [3, 2, 1]);
    }
}
