//! The wire form: bytes for streams between processes and in files.
//!
//! Every session or file starts with a [`Table`]: the format version and the writer's operation names with their
//! signatures. An operation is then written as its place in that table, so inserting a line in an op table changes
//! nothing for older readers, and a name that a reader does not know is a typed error. Integers are LEB128. Lengths are
//! checked against the bytes that are there before anything is allocated.

use crate::{
    AxisSet, DType, Dims, Field, FieldSink, FieldSource, FormError, Id, Item, MAX_RANK, Meta, Node, Op,
    OpSet, Real, Scalar,
};

/// Version of the form described here.
pub const VERSION: u64 = 1;

/// How many entries are allocated on a writer's word alone; beyond it lists grow as entries are really read.
const BELIEVED: usize = 256;

/// Why bytes are not a stream.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum WireError {
    #[error("the bytes end too early")]
    Truncated,
    #[error("wire version {got} is not supported; this program reads {VERSION}")]
    Version { got: u64 },
    #[error("the writer's operation `{name}` is unknown here, or has other fields")]
    UnknownOp { name: String },
    #[error("malformed {what}")]
    Malformed { what: &'static str },
}

/// A writer's or reader's operation names, by place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    names: Vec<(String, String)>,
    /// Place of each operation that has one here, by number.
    places: Vec<Option<u64>>,
    /// Whether an entry means the same here.
    known: Vec<bool>,
}

impl Table {
    /// This build's table.
    pub fn local() -> Table {
        let names =
            Op::names().into_iter().map(|n| (n.to_string(), Op::signature(n).unwrap_or_default())).collect();
        Table::of(names)
    }

    fn of(names: Vec<(String, String)>) -> Table {
        let known = names.iter().map(|(n, s)| Op::signature(n).as_deref() == Some(s)).collect();
        let by_name: rustc_hash::FxHashMap<&str, u64> =
            names.iter().enumerate().map(|(i, (n, _))| (&n[..], i as u64)).collect();
        let places = Op::names().into_iter().map(|name| by_name.get(name).copied()).collect();
        Table { names, places, known }
    }

    /// Writes it, with the version.
    pub fn encode(&self, w: &mut Writer) {
        w.int(VERSION);
        w.int(self.names.len() as u64);
        for (name, signature) in &self.names {
            w.text(name);
            w.text(signature);
        }
    }

    /// Reads a table that another build may have written.
    pub fn decode(r: &mut Reader<'_>) -> Result<Table, WireError> {
        let got = r.int()?;
        if got != VERSION {
            return Err(WireError::Version { got });
        }
        let count = r.length(2)?;
        let mut names = Vec::with_capacity(count.min(BELIEVED));
        for _ in 0..count {
            names.push((r.text()?, r.text()?));
        }
        Ok(Table::of(names))
    }

    /// Writes items.
    pub fn items(&self, items: &[Item], w: &mut Writer) {
        w.int(items.len() as u64);
        for item in items {
            self.item(item, w);
        }
    }

    /// Writes one item: 0 and the id for a free, else the operation's place plus one, fields, operands, results.
    pub fn item(&self, item: &Item, w: &mut Writer) {
        match item {
            Item::Free(id) => {
                w.int(0);
                w.int(id.0);
            }
            Item::Run(node) => {
                w.int(self.place(&node.op) + 1);
                node.op.fields(w);
                w.ids(&node.ins);
                w.ids(&node.outs);
            }
        }
    }

    /// The place of an operation.
    pub fn place(&self, op: &Op) -> u64 {
        self.places[op.number()].expect("who writes has a table of its own operations")
    }

    /// The operations that the writer of this table has, with the fields that they have here.
    pub fn common(&self) -> OpSet {
        let known = |place: &Option<u64>| place.is_some_and(|place| self.known[place as usize]);
        OpSet::of((0..self.places.len()).filter(|&number| known(&self.places[number])))
    }

    /// The operation at `place`, its fields taken from `source`.
    pub fn build(&self, place: u64, source: &mut dyn FieldSource) -> Result<Op, WireError> {
        let at = usize::try_from(place).map_err(|_| WireError::Malformed { what: "operation" })?;
        let (name, _) = self.names.get(at).ok_or(WireError::Malformed { what: "operation" })?;
        if !self.known[at] {
            return Err(WireError::UnknownOp { name: name.clone() });
        }
        Op::build(name, source).map_err(|e| match e {
            FormError::UnknownOp { name } => WireError::UnknownOp { name },
            FormError::BadField { key } => WireError::Malformed { what: key },
        })
    }

    /// Reads items.
    pub fn read_items(&self, r: &mut Reader<'_>) -> Result<Vec<Item>, WireError> {
        let count = r.length(2)?;
        let mut items = Vec::with_capacity(count.min(BELIEVED));
        for _ in 0..count {
            items.push(self.read_item(r)?);
        }
        Ok(items)
    }

    /// Reads one item.
    pub fn read_item(&self, r: &mut Reader<'_>) -> Result<Item, WireError> {
        let Some(place) = r.int()?.checked_sub(1) else { return Ok(Item::Free(Id(r.int()?))) };
        let op = self.build(place, r).map_err(|e| r.failed.take().unwrap_or(e))?;
        let (ins, outs) = (r.ids()?, r.ids()?);
        Ok(Item::Run(Node { op, ins: ins.into(), outs: outs.into() }))
    }
}

/// Appends to a byte buffer.
#[derive(Clone, Default, Debug)]
pub struct Writer {
    /// What has been written.
    pub bytes: Vec<u8>,
}

#[allow(missing_docs)]
impl Writer {
    pub fn int(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    pub fn blob(&mut self, bytes: &[u8]) {
        self.int(bytes.len() as u64);
        self.bytes.extend_from_slice(bytes);
    }

    pub fn text(&mut self, text: &str) {
        self.blob(text.as_bytes());
    }

    pub fn ids(&mut self, ids: &[Id]) {
        self.int(ids.len() as u64);
        ids.iter().for_each(|id| self.int(id.0));
    }

    pub fn meta(&mut self, meta: &Meta) {
        self.text(meta.dtype.name());
        self.int(meta.shape.len() as u64);
        meta.shape.iter().for_each(|&d| self.int(d as u64));
    }
}

impl FieldSink for Writer {
    fn put(&mut self, _: &'static str, field: Field) {
        match field {
            Field::Shape(x) => {
                self.int(x.len() as u64);
                x.iter().for_each(|&d| self.int(d as u64));
            }
            Field::Scalar(x) => {
                self.text(x.dtype().name());
                self.int(x.bits());
            }
            Field::DType(x) => self.text(x.name()),
            Field::Axis(x) => self.bytes.push(x),
            Field::Axes(x) => self.bytes.push(x.0),
            Field::Order(x) => self.blob(&x),
            Field::Flag(x) => self.bytes.push(x as u8),
            Field::Bound(x) => self.int(x as u64),
            Field::Word(x) => self.int(x),
            Field::Real(x) => self.bytes.extend_from_slice(&x.get().to_bits().to_le_bytes()),
            Field::Triple(x) => x.iter().for_each(|&n| self.int(n as u64)),
            Field::Count(x) => self.int(x as u64),
            Field::Name(x) => self.text(&x),
            Field::Bytes(x) => self.blob(&x),
        }
    }
}

/// Reads from the front of a byte slice.
#[derive(Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    failed: Option<WireError>,
}

#[allow(missing_docs)]
impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes, failed: None }
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Everything that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.bytes)
    }

    pub fn take(&mut self, n: usize) -> Result<&'a [u8], WireError> {
        let (head, rest) = self.bytes.split_at_checked(n).ok_or(WireError::Truncated)?;
        self.bytes = rest;
        Ok(head)
    }

    pub fn byte(&mut self) -> Result<u8, WireError> {
        Ok(self.take(1)?[0])
    }

    pub fn int(&mut self) -> Result<u64, WireError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let part = (byte & 0x7f) as u64;
            if shift == 63 && part > 1 {
                break;
            }
            value |= part << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(WireError::Malformed { what: "integer" })
    }

    /// A count of things that take at least `least` bytes each: never more than what is left can hold.
    pub fn length(&mut self, least: usize) -> Result<usize, WireError> {
        let n = usize::try_from(self.int()?).map_err(|_| WireError::Truncated)?;
        if n > self.bytes.len() / least.max(1) { Err(WireError::Truncated) } else { Ok(n) }
    }

    pub fn blob(&mut self) -> Result<&'a [u8], WireError> {
        let n = self.length(1)?;
        self.take(n)
    }

    pub fn text(&mut self) -> Result<String, WireError> {
        let bytes = self.blob()?;
        String::from_utf8(bytes.to_vec()).map_err(|_| WireError::Malformed { what: "text" })
    }

    pub fn ids(&mut self) -> Result<Vec<Id>, WireError> {
        let n = self.length(1)?;
        (0..n).map(|_| self.int().map(Id)).collect()
    }

    pub fn meta(&mut self) -> Result<Meta, WireError> {
        let dtype = self.dtype()?;
        Ok(Meta { dtype, shape: self.dims()? })
    }

    fn dtype(&mut self) -> Result<DType, WireError> {
        let name = self.blob()?;
        std::str::from_utf8(name)
            .ok()
            .and_then(DType::from_name)
            .ok_or(WireError::Malformed { what: "dtype" })
    }

    fn dims(&mut self) -> Result<Dims<usize>, WireError> {
        let n = self.length(1)?;
        if n > MAX_RANK {
            return Err(WireError::Malformed { what: "shape" });
        }
        let mut dims = Dims::repeat(0, n);
        for d in dims.iter_mut() {
            *d = self.size()?;
        }
        Ok(dims)
    }

    fn size(&mut self) -> Result<usize, WireError> {
        usize::try_from(self.int()?).map_err(|_| WireError::Malformed { what: "size" })
    }

    fn small(&mut self) -> Result<u32, WireError> {
        u32::try_from(self.int()?).map_err(|_| WireError::Malformed { what: "count" })
    }

    fn field(&mut self, like: Field) -> Result<Field, WireError> {
        Ok(match like {
            Field::Shape(_) => Field::Shape(self.dims()?),
            Field::Scalar(_) => {
                let dtype = self.dtype()?;
                let scalar = Scalar::from_bits(dtype, self.int()?);
                if dtype.is_quantised() {
                    return Err(WireError::Malformed { what: "scalar" });
                }
                Field::Scalar(scalar)
            }
            Field::DType(_) => Field::DType(self.dtype()?),
            Field::Axis(_) => Field::Axis(self.byte()?),
            Field::Axes(_) => Field::Axes(AxisSet(self.byte()?)),
            Field::Order(_) => {
                Field::Order(Dims::try_new(self.blob()?).ok_or(WireError::Malformed { what: "order" })?)
            }
            Field::Flag(_) => match self.byte()? {
                flag @ (0 | 1) => Field::Flag(flag == 1),
                _ => return Err(WireError::Malformed { what: "flag" }),
            },
            Field::Bound(_) => Field::Bound(self.size()?),
            Field::Word(_) => Field::Word(self.int()?),
            Field::Real(_) => {
                let bits = self.take(8)?.try_into().map(u64::from_le_bytes).unwrap_or_default();
                Field::Real(Real::new(f64::from_bits(bits)))
            }
            Field::Triple(_) => Field::Triple([self.small()?, self.small()?, self.small()?]),
            Field::Count(_) => Field::Count(self.small()?),
            Field::Name(_) => Field::Name(self.text()?),
            Field::Bytes(_) => Field::Bytes(self.blob()?.to_vec()),
        })
    }
}

impl FieldSource for Reader<'_> {
    fn get(&mut self, key: &'static str, like: Field) -> Result<Field, FormError> {
        self.field(like).map_err(|error| {
            self.failed = Some(error);
            FormError::BadField { key }
        })
    }
}
