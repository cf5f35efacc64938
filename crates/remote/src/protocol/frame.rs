//! Frames: the unit in which bytes are checked, numbered and counted.
//!
//! A frame is a head of 17 bytes (length of the payload, checksum, sequence number, kind) and the payload. The checksum
//! is the CRC-32 of sequence number, kind and payload. Control frames have the number 0: they are neither numbered nor
//! acknowledged nor sent again.

use super::ProtocolError;

/// Bytes before the payload.
pub const HEAD: usize = 17;
/// The longest payload.
pub const MOST: usize = 1 << 20;

/// Bytes of an unfinished frame that are a sign of life.
const ALIVE: usize = 4 << 10;
/// Bytes that are asked of a stream at least.
const READ: usize = 64 << 10;

/// A received frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Frame<'a> {
    /// Its place among the numbered frames of this direction, from 1; 0 for control frames.
    pub seq: u64,
    /// What the payload is.
    pub kind: u8,
    /// What the message says.
    pub payload: &'a [u8],
}

/// The head of a frame whose payload is the concatenation of `parts`.
pub fn head(seq: u64, kind: u8, parts: [&[u8]; 2]) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    let len = (parts[0].len() + parts[1].len()) as u32;
    head[..4].copy_from_slice(&len.to_le_bytes());
    head[8..16].copy_from_slice(&seq.to_le_bytes());
    head[16] = kind;
    let mut sum = crc32fast::Hasher::new();
    sum.update(&head[8..]);
    parts.iter().for_each(|part| sum.update(part));
    head[4..8].copy_from_slice(&sum.finalize().to_le_bytes());
    head
}

/// A control frame.
pub fn control(kind: u8, payload: &[u8]) -> Vec<u8> {
    [&head(0, kind, [payload, &[]])[..], payload].concat()
}

/// Cuts arriving bytes into frames. It holds at most one frame and what came with its last bytes.
#[derive(Default, Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Bytes before `start` were given out, bytes from `end` on are spare.
    start: usize,
    end: usize,
    /// Bytes that came, and whether a frame was whole, since [`Decoder::heard`] was last true.
    came: usize,
    whole: bool,
}

impl Decoder {
    /// Memory for the next bytes, at least `least` of them; [`Decoder::filled`] says how many came.
    pub fn spare(&mut self, least: usize) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.buffer.len() - self.end < least && self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.buffer.len() - self.end < least {
            self.buffer.resize(self.end + least, 0);
        }
        &mut self.buffer[self.end..]
    }

    /// Memory for what is missing of a long frame and no more, so that nothing has to be moved to the front afterwards;
    /// else for a good many short ones.
    pub fn spare_for_frame(&mut self) -> &mut [u8] {
        let want = self.missing().clamp(READ, HEAD + MOST);
        &mut self.spare(want)[..want]
    }

    /// The first `count` bytes of that memory have been filled.
    pub fn filled(&mut self, count: usize) {
        self.end = (self.end + count).min(self.buffer.len());
        self.came += count;
    }

    /// Appends bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.spare(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.filled(bytes.len());
    }

    /// Whether the peer was heard since this was last true: a whole frame came, or a good part of a long one. A length
    /// that was damaged on the way makes one frame of many; the few bytes that an idle peer sends do not end it, and
    /// must not keep the connection.
    pub fn heard(&mut self) -> bool {
        let heard = self.whole || self.came >= ALIVE;
        if heard {
            (self.came, self.whole) = (0, false);
        }
        heard
    }

    /// How many bytes are missing for the next frame, as far as is known; 0 if it is complete.
    pub fn missing(&self) -> usize {
        let held = self.end - self.start;
        let want = if held < 4 { HEAD } else { HEAD + word(&self.buffer[self.start..]) as usize };
        want.saturating_sub(held)
    }

    /// The next frame, if all of it is there.
    pub fn next(&mut self) -> Result<Option<Frame<'_>>, ProtocolError> {
        let held = &self.buffer[self.start..self.end];
        if held.len() < 4 {
            return Ok(None);
        }
        let len = word(held) as usize;
        if len > MOST {
            return Err(ProtocolError::TooLong { len, most: MOST });
        }
        if held.len() < HEAD + len {
            return Ok(None);
        }
        if crc32fast::hash(&held[8..HEAD + len]) != word(&held[4..]) {
            return Err(ProtocolError::Checksum);
        }
        self.whole = true;
        let from = self.start;
        self.start += HEAD + len;
        let frame = &self.buffer[from..self.start];
        let mut seq = [0; 8];
        seq.copy_from_slice(&frame[8..16]);
        Ok(Some(Frame { seq: u64::from_le_bytes(seq), kind: frame[16], payload: &frame[HEAD..] }))
    }
}

/// The little-endian word that the slice starts with.
fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(seq: u64, kind: u8, payload: &[u8]) -> Vec<u8> {
        let mut bytes = head(seq, kind, [payload, &[]]).to_vec();
        bytes.extend_from_slice(payload);
        bytes
    }

    #[test]
    fn frames_survive_any_cut() {
        let bytes: Vec<u8> =
            [frame(1, 3, b"hello"), frame(0, 9, b""), frame(u64::MAX, 255, &[7; 300])].concat();
        for size in 1..bytes.len() {
            let mut decoder = Decoder::default();
            let mut got = Vec::new();
            for piece in bytes.chunks(size) {
                decoder.feed(piece);
                while let Some(frame) = decoder.next().unwrap() {
                    got.push((frame.seq, frame.kind, frame.payload.len()));
                }
            }
            assert_eq!(got, [(1, 3, 5), (0, 9, 0), (u64::MAX, 255, 300)], "pieces of {size}");
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let bytes = frame(5, 2, b"numbers");
        for bit in 0..bytes.len() * 8 {
            let mut decoder = Decoder::default();
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            decoder.feed(&flipped);
            // A changed length may make it wait for more, or end too early; it never passes for the frame.
            let passed = decoder.next();
            assert!(!matches!(passed, Ok(Some(_))), "bit {bit} passed");
        }
    }

    #[test]
    fn a_long_frame_is_refused_before_it_is_held() {
        for len in [MOST as u32 + 1, 1 << 31, u32::MAX] {
            let mut decoder = Decoder::default();
            decoder.feed(&len.to_le_bytes());
            assert!(matches!(decoder.next(), Err(ProtocolError::TooLong { .. })), "{len}");
            assert!(decoder.buffer.len() < 64);
        }
    }

    #[test]
    fn a_trickle_after_a_wrong_length_is_no_sign_of_life() {
        let mut decoder = Decoder::default();
        decoder.feed(&frame(1, 7, b"all well"));
        assert!(decoder.next().unwrap().is_some() && decoder.heard() && !decoder.heard());
        let mut damaged = frame(2, 7, b"longer than it is");
        damaged[1] ^= 64;
        decoder.feed(&damaged);
        for seq in 3..20 {
            decoder.feed(&frame(seq, 7, b"still here"));
            assert!(decoder.next().unwrap().is_none() && !decoder.heard());
        }
        decoder.feed(&[0; ALIVE]);
        assert!(decoder.heard(), "a long frame comes in pieces");
    }
}
