//! The first words of a connection: who wants what, and the server's answer.

use super::ProtocolError;
use super::message::{Capability, array, ints};
use kiln_device::{DeviceInfo, Processor, Usage};
use kiln_ir::DType;
use kiln_ir::wire::{Reader, WireError, Writer};

/// What a client wants of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// A new session with the device of this name; empty for the first.
    Open {
        /// The device.
        device: String,
    },
    /// To go on with a session.
    Resume {
        /// The session.
        session: u64,
        /// What only its client knows.
        secret: [u8; 32],
        /// Counts the connections of a session; an older one is cut off.
        epoch: u64,
        /// The last frame that the client has received.
        received: u64,
    },
    /// To fetch a value that a session has exposed.
    Fetch {
        /// What the value was exposed under.
        capability: Capability,
        /// Names the transfer, so that asking again is no second fetch.
        transfer: u64,
        /// Bytes that are there already.
        from: u64,
    },
    /// The same, and what the client has chosen cannot be recognised in the bytes: they may go to something that is no
    /// server, and must be no words that it understands.
    Masked {
        /// Random bytes of this connection.
        mask: [u8; 32],
        /// What the value was exposed under.
        capability: Capability,
        /// Names the transfer, so that asking again is no second fetch.
        transfer: u64,
        /// Bytes that are there already.
        from: u64,
    },
    /// To look at the server.
    Watch,
}

/// Each byte with that of the mask: twice is what it was.
fn masked(capability: &Capability, mask: &[u8; 32]) -> Capability {
    std::array::from_fn(|i| capability[i] ^ mask[i])
}

/// The client's first frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// The oldest and newest version it speaks.
    pub versions: (u64, u64),
    /// Proves that it may connect.
    pub token: Vec<u8>,
    /// What it wants.
    pub purpose: Purpose,
    /// It understands compressed payloads, and sends them if the server does too.
    pub compress: bool,
    /// The program's name, for people who look at the server.
    pub program: String,
    /// Its operation table, see [`kiln_ir::wire::Table`].
    pub table: Vec<u8>,
}

/// The server's answer.
#[derive(Clone, PartialEq, Debug)]
pub struct Welcome {
    /// The version that both speak.
    pub version: u64,
    /// Names the session.
    pub session: u64,
    /// What the client needs to resume it.
    pub secret: [u8; 32],
    /// Another number after every start of the server.
    pub incarnation: u64,
    /// The last frame that the server has received, if the session went on.
    pub resumed: Option<u64>,
    /// How long the session outlives a lost connection, in milliseconds.
    pub lease: u64,
    /// How often each side speaks at least, in milliseconds.
    pub heartbeat: u64,
    /// Compressed payloads may be sent.
    pub compress: bool,
    /// The device.
    pub info: DeviceInfo,
    /// The server's operation table.
    pub table: Vec<u8>,
    /// How other servers reach it; empty if they take the way that the client has taken.
    pub advertise: String,
}

/// Why a server does not take a connection.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Refusal {
    #[error("it speaks protocol versions {0} to {1}")]
    Version(u64, u64),
    #[error("the token is wrong")]
    Token,
    #[error("the session is not known, or its lease has ended")]
    Session,
    #[error("a newer connection has taken the session over")]
    Fenced,
    #[error("it has no device `{0}`")]
    Device(String),
    #[error("it serves {0} sessions, which is its limit")]
    Full(u64),
    #[error("it is shutting down")]
    Draining,
    #[error("the value is not exposed, or no more")]
    Capability,
    #[error("{0}")]
    Other(String),
}

fn flag(r: &mut Reader<'_>) -> Result<bool, ProtocolError> {
    match r.byte()? {
        byte @ (0 | 1) => Ok(byte == 1),
        _ => Err(WireError::Malformed { what: "flag" }.into()),
    }
}

impl Hello {
    /// Its payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        ints(&mut w, 0, &[self.versions.0, self.versions.1]);
        w.blob(&self.token);
        match &self.purpose {
            Purpose::Open { device } => {
                w.int(0);
                w.text(device);
            }
            Purpose::Resume { session, secret, epoch, received } => {
                ints(&mut w, 0, &[1, *session, *epoch, *received]);
                w.bytes.extend_from_slice(secret);
            }
            Purpose::Fetch { capability, transfer, from: 0 } => {
                ints(&mut w, 0, &[2, *transfer]);
                w.bytes.extend_from_slice(capability);
            }
            Purpose::Fetch { capability, transfer, from } => {
                ints(&mut w, 0, &[4, *transfer, *from]);
                w.bytes.extend_from_slice(capability);
            }
            Purpose::Masked { mask, capability, transfer, from } => {
                w.int(5);
                w.bytes.extend_from_slice(mask);
                w.bytes.extend_from_slice(&masked(capability, mask));
                let mut first = [0; 8];
                first.copy_from_slice(&mask[..8]);
                ints(&mut w, 0, &[*transfer ^ u64::from_le_bytes(first), *from]);
            }
            Purpose::Watch => w.int(3),
        }
        w.bytes.push(self.compress as u8);
        w.text(&self.program);
        w.blob(&self.table);
        w.bytes
    }

    /// Reads one. Of another version only the versions are looked at.
    pub fn decode(payload: &[u8]) -> Result<Hello, ProtocolError> {
        let mut r = Reader::new(payload);
        let versions = (r.int()?, r.int()?);
        if common(versions).is_none() {
            let (token, program, table) = (Vec::new(), String::new(), Vec::new());
            return Ok(Hello { versions, token, purpose: Purpose::Watch, compress: false, program, table });
        }
        let token = r.blob()?.to_vec();
        let purpose = match r.int()? {
            0 => Purpose::Open { device: r.text()? },
            1 => {
                let (session, epoch, received) = (r.int()?, r.int()?, r.int()?);
                Purpose::Resume { session, epoch, received, secret: array(&mut r)? }
            }
            2 => Purpose::Fetch { transfer: r.int()?, from: 0, capability: array(&mut r)? },
            4 => Purpose::Fetch { transfer: r.int()?, from: r.int()?, capability: array(&mut r)? },
            5 => {
                let mask: [u8; 32] = array(&mut r)?;
                let capability = masked(&array(&mut r)?, &mask);
                let mut first = [0; 8];
                first.copy_from_slice(&mask[..8]);
                let transfer = r.int()? ^ u64::from_le_bytes(first);
                Purpose::Masked { mask, capability, transfer, from: r.int()? }
            }
            3 => Purpose::Watch,
            _ => return Err(WireError::Malformed { what: "purpose" }.into()),
        };
        let compress = flag(&mut r)?;
        Ok(Hello { versions, token, purpose, compress, program: r.text()?, table: r.blob()?.to_vec() })
    }
}

/// The newest version that both sides speak.
pub fn common(versions: (u64, u64)) -> Option<u64> {
    let newest = versions.1.min(super::VERSIONS.1);
    (newest >= versions.0.max(super::VERSIONS.0)).then_some(newest)
}

impl Welcome {
    /// Its payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        ints(&mut w, 0, &[self.version, self.session, self.incarnation]);
        w.bytes.extend_from_slice(&self.secret);
        // One more than the number, so that 0 can stand for none.
        w.int(self.resumed.map_or(0, |seq| seq + 1));
        ints(&mut w, 0, &[self.lease, self.heartbeat]);
        w.bytes.push(self.compress as u8);
        info(&self.info, &mut w);
        w.blob(&self.table);
        if !self.advertise.is_empty() {
            w.text(&self.advertise);
        }
        w.bytes
    }

    /// Reads one.
    pub fn decode(payload: &[u8]) -> Result<Welcome, ProtocolError> {
        let mut r = Reader::new(payload);
        let (version, session, incarnation) = (r.int()?, r.int()?, r.int()?);
        let secret = array(&mut r)?;
        let resumed = r.int()?.checked_sub(1);
        let (lease, heartbeat, compress) = (r.int()?, r.int()?, flag(&mut r)?);
        let (info, table) = (read_info(&mut r)?, r.blob()?.to_vec());
        let advertise = if r.is_empty() { String::new() } else { r.text()? };
        Ok(Welcome {
            version,
            session,
            secret,
            incarnation,
            resumed,
            lease,
            heartbeat,
            compress,
            info,
            table,
            advertise,
        })
    }
}

fn info(info: &DeviceInfo, w: &mut Writer) {
    w.text(&info.name);
    w.text(&info.numerics);
    // No threads: it does not compute on cores.
    ints(w, 0, &[info.count as u64, info.threads().unwrap_or(0) as u64, info.usage.len() as u64]);
    for (dtype, usage) in &info.usage {
        w.text(dtype.name());
        w.bytes.push(usage.bits());
    }
}

fn read_info(r: &mut Reader<'_>) -> Result<DeviceInfo, ProtocolError> {
    let (name, numerics) = (r.text()?, r.text()?);
    let (count, threads) = (r.int()? as usize, r.int()? as usize);
    let dtypes = r.length(2)?;
    let mut usage = Vec::new();
    for _ in 0..dtypes {
        let (name, bits) = (r.text()?, r.byte()?);
        // A dtype that this build does not know cannot be used from here.
        usage.extend(DType::from_name(&name).map(|dtype| (dtype, Usage::from_bits(bits))));
    }
    let processor = if threads == 0 { Processor::Accelerator } else { Processor::Cores { threads } };
    Ok(DeviceInfo { count, usage, processor, ..DeviceInfo::new(&name, &numerics) })
}

impl Refusal {
    /// Its payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Refusal::Version(oldest, newest) => drop(ints(&mut w, 0, &[0, *oldest, *newest])),
            Refusal::Token => w.int(1),
            Refusal::Session => w.int(2),
            Refusal::Fenced => w.int(3),
            Refusal::Device(name) => {
                w.int(4);
                w.text(name);
            }
            Refusal::Full(most) => drop(ints(&mut w, 0, &[5, *most])),
            Refusal::Draining => w.int(6),
            Refusal::Capability => w.int(7),
            Refusal::Other(reason) => {
                w.int(8);
                w.text(reason);
            }
        }
        w.bytes
    }

    /// Reads one.
    pub fn decode(payload: &[u8]) -> Result<Refusal, ProtocolError> {
        let mut r = Reader::new(payload);
        Ok(match r.int()? {
            0 => Refusal::Version(r.int()?, r.int()?),
            1 => Refusal::Token,
            2 => Refusal::Session,
            3 => Refusal::Fenced,
            4 => Refusal::Device(r.text()?),
            5 => Refusal::Full(r.int()?),
            6 => Refusal::Draining,
            7 => Refusal::Capability,
            8 => Refusal::Other(r.text()?),
            // A later version may have more reasons.
            code => Refusal::Other(format!("refused with code {code}")),
        })
    }
}
