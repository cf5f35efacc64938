//! The protocol byte by byte, for clients that do not behave.

use kiln_remote::protocol::frame::control;
use kiln_remote::protocol::frame::{self, Decoder};
use kiln_remote::protocol::greeting::{Hello, Purpose, Refusal, Welcome};
use kiln_remote::protocol::message::{Message, kind};
use kiln_remote::protocol::template;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A hello that opens a session.
pub fn hello(token: &[u8], purpose: Purpose) -> Hello {
    let mut table = kiln_ir::wire::Writer::default();
    kiln_ir::wire::Table::local().encode(&mut table);
    Hello {
        versions: kiln_remote::protocol::VERSIONS,
        token: token.to_vec(),
        purpose,
        compress: false,
        program: "raw".into(),
        table: table.bytes,
    }
}

/// A connection without a client behind it.
pub struct Raw {
    /// The socket.
    pub stream: TcpStream,
    decoder: Decoder,
    seq: u64,
}

impl Raw {
    /// Connects. Reads wait for 5 seconds at most.
    pub fn connect(address: SocketAddr) -> Raw {
        Raw::over(TcpStream::connect(address).expect("a server that listens"))
    }

    /// Speaks over this socket.
    pub fn over(stream: TcpStream) -> Raw {
        let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
        let _ = stream.set_nodelay(true);
        Raw { stream, decoder: Decoder::default(), seq: 0 }
    }

    /// Sends a hello and gives the answer.
    pub fn greet(&mut self, hello: &Hello) -> Result<Welcome, Refusal> {
        self.bytes(&control(kind::HELLO, &hello.encode()));
        match self.frame() {
            Some((_, kind::WELCOME, payload)) => Ok(Welcome::decode(&payload).expect("a welcome")),
            Some((_, kind::REFUSED, payload)) => Err(Refusal::decode(&payload).expect("a refusal")),
            other => Err(Refusal::Other(format!("{:?}", other.map(|f| f.1)))),
        }
    }

    /// A connection with a session of its own.
    pub fn open(address: SocketAddr) -> (Raw, Welcome) {
        let mut raw = Raw::connect(address);
        let welcome = raw.greet(&hello(b"", Purpose::Open { device: String::new() }));
        (raw, welcome.expect("a session"))
    }

    /// Sends bytes as they are. False if the other side has closed.
    pub fn bytes(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    /// Sends a numbered message.
    pub fn send(&mut self, message: &Message<'_>) -> bool {
        let (kind, body) = message.encode();
        self.send_kind(kind, &body.fields)
    }

    /// Sends a numbered frame.
    pub fn send_kind(&mut self, kind: u8, payload: &[u8]) -> bool {
        self.seq += 1;
        let head = frame::head(self.seq, kind, [payload, &[]]);
        self.bytes(&[&head[..], payload].concat())
    }

    /// Sends a batch as a new template.
    pub fn define(&mut self, template: u64, items: &[kiln_ir::Item]) -> bool {
        let split = template::split(&kiln_ir::wire::Table::local(), items, kiln_device::Place::Reuse);
        let mut bindings = kiln_ir::wire::Writer::default();
        bindings.int(split.bindings.len() as u64);
        template::difference(&[], &split.bindings, &mut bindings);
        self.send(&Message::Define { template, structure: &split.structure, bindings: &bindings.bytes })
    }

    /// Why the server ended the session; `None` if it did not within 5 silent seconds.
    pub fn ended(&mut self) -> Option<String> {
        loop {
            let (_, kind, payload) = self.frame()?;
            if kind == kind::ENDED {
                return Some(String::from_utf8_lossy(&payload).into_owned());
            }
        }
    }

    /// The next frame: number, kind, payload. `None` at the end of the connection, or after 5 silent seconds.
    pub fn frame(&mut self) -> Option<(u64, u8, Vec<u8>)> {
        loop {
            if let Some(frame) = self.decoder.next().ok()? {
                return Some((frame.seq, frame.kind, frame.payload.to_vec()));
            }
            let spare = self.decoder.spare(16 << 10);
            match self.stream.read(spare) {
                Ok(n) if n > 0 => self.decoder.filled(n),
                _ => return None,
            }
        }
    }

    /// The next frame that is neither an acknowledgement nor news of progress.
    pub fn answer(&mut self) -> Option<(u8, Vec<u8>)> {
        loop {
            match self.frame()? {
                (_, kind::ACK | kind::PROGRESS | kind::PONG, _) => {}
                (_, kind, payload) => return Some((kind, payload)),
            }
        }
    }
}
