//! The tensor protocol without IO. docs/PROTOCOL.md describes the bytes.
//!
//! [`frame`] cuts bytes into checked frames; [`Link`] numbers, acknowledges and resends them; [`greeting`] and
//! [`Message`] are what they say; [`template`] makes a recurring batch a call with bindings.

pub mod fault;
pub mod frame;
pub mod greeting;
pub mod link;
pub mod message;
pub mod template;

pub use frame::{Decoder, Frame};
pub use greeting::{Hello, Purpose, Refusal, Welcome};
pub use link::{Body, Link};
pub use message::Message;

/// The oldest and newest versions that this build speaks. Version 2 has [`Message::Poison`], version 3
/// [`message::Query::Trace`] and [`message::Query::Spans`].
pub const VERSIONS: (u64, u64) = (1, 3);

/// Characters of a peer's text that are shown.
const SHOWN: usize = 500;

/// A peer's text as it may be shown to people: short, and without what would steer a terminal.
pub fn plain(text: &str) -> String {
    text.chars().take(SHOWN).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Why a peer's bytes are not the protocol. The connection ends, the session may go on over another.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ProtocolError {
    #[error("a frame of {len} bytes, where {most} are the most")]
    TooLong { len: usize, most: usize },
    #[error("a frame's checksum is wrong")]
    Checksum,
    #[error("frame {got} came where {want} was due")]
    Gap { got: u64, want: u64 },
    #[error("an acknowledgement of frame {got}, but only {sent} were sent")]
    Ack { got: u64, sent: u64 },
    #[error("the peer sent more than its window allows")]
    Window,
    #[error("a message of kind {0} is not known or not expected here")]
    Kind(u8),
    #[error(transparent)]
    Wire(#[from] kiln_ir::wire::WireError),
    #[error("{0}")]
    Misuse(&'static str),
}
