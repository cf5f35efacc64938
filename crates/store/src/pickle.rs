//! The part of Python's pickle that PyTorch writes, protocols 2 to 5. Nothing is called: what a pickle would construct is
//! kept as data.
//!
//! All that is made lies in one table and names the rest by number, so that what holds itself, and what is nested a million
//! times, costs no more than its bytes.

use std::collections::HashMap;

/// How many values a pickle may make.
const MOST: usize = 1 << 22;

/// What was pickled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    /// A text, by number.
    Text(u32),
    /// A class or function: its module and name, by number.
    Global(u32),
    /// What holds others, by number.
    Node(u32),
    /// Begins a row of values.
    Mark,
}

/// What holds others.
#[derive(Clone, Debug)]
pub(crate) enum Node {
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    /// What a class or function makes of arguments, and the state that it was given.
    Object {
        class: Value,
        args: Value,
        state: Value,
    },
    /// Something that lies outside the pickle.
    Outside(Value),
}

/// Everything that pickles have made.
#[derive(Default)]
pub(crate) struct Heap {
    texts: Vec<String>,
    globals: Vec<(String, String)>,
    nodes: Vec<Node>,
    /// Values that were copied from one node to another.
    copied: usize,
}

impl Heap {
    pub(crate) fn text(&self, value: Value) -> Option<&str> {
        match value {
            Value::Text(at) => self.texts.get(at as usize).map(String::as_str),
            _ => None,
        }
    }

    pub(crate) fn global(&self, value: Value) -> Option<(&str, &str)> {
        match value {
            Value::Global(at) => self.globals.get(at as usize).map(|(module, name)| (&**module, &**name)),
            _ => None,
        }
    }

    pub(crate) fn node(&self, value: Value) -> Option<&Node> {
        match value {
            Value::Node(at) => self.nodes.get(at as usize),
            _ => None,
        }
    }

    /// The items of a tuple or list.
    pub(crate) fn items(&self, value: Value) -> Option<&[Value]> {
        match self.node(value)? {
            Node::List(items) | Node::Tuple(items) => Some(items),
            _ => None,
        }
    }

    /// All that hold others.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter()
    }

    fn made(&self) -> usize {
        self.texts.len() + self.globals.len() + self.nodes.len() + self.copied
    }

    fn add(&mut self, node: Node) -> Value {
        self.nodes.push(node);
        Value::Node(self.nodes.len() as u32 - 1)
    }

    fn add_text(&mut self, bytes: &[u8]) -> Result<Value, String> {
        let text = std::str::from_utf8(bytes).map_err(|e| e.to_string())?;
        self.texts.push(text.into());
        Ok(Value::Text(self.texts.len() as u32 - 1))
    }

    fn add_global(&mut self, module: &str, name: &str) -> Value {
        self.globals.push((module.into(), name.into()));
        Value::Global(self.globals.len() as u32 - 1)
    }
}

/// Bytes that are read one after another.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let (head, rest) = self.0.split_at_checked(len).ok_or("a pickle ends too early")?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        Ok(self.take(N)?.try_into().unwrap_or([0; N]))
    }

    fn byte(&mut self) -> Result<usize, String> {
        Ok(self.array::<1>()?[0] as usize)
    }

    fn word(&mut self) -> Result<usize, String> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }

    fn long(&mut self) -> Result<usize, String> {
        usize::try_from(u64::from_le_bytes(self.array()?)).map_err(|e| e.to_string())
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let end = self.0.iter().position(|&b| b == b'\n').ok_or("a pickle ends too early")?;
        let line = self.take(end)?;
        self.take(1)?;
        std::str::from_utf8(line).map_err(|e| e.to_string())
    }
}

/// A whole number of any length, little-endian.
fn integer(bytes: &[u8]) -> Result<Value, String> {
    let negative = bytes.last().is_some_and(|&b| b >= 0x80);
    let fill = if negative { 0xff } else { 0 };
    if bytes.get(8..).is_some_and(|more| more.iter().any(|&b| b != fill)) {
        // PyTorch's magic number is longer than 8 bytes, and nothing else that is wanted.
        return Ok(Value::None);
    }
    let mut word = [fill; 8];
    let len = bytes.len().min(8);
    word[..len].copy_from_slice(&bytes[..len]);
    Ok(Value::Int(i64::from_le_bytes(word)))
}

/// Reads one pickle from the front of `bytes`: what it is, and how long.
pub(crate) fn read(bytes: &[u8], heap: &mut Heap) -> Result<(Value, usize), String> {
    let mut input = Cursor(bytes);
    let (mut stack, mut memo) = (Vec::<Value>::new(), HashMap::<usize, Value>::new());
    loop {
        if heap.made() + stack.len() + memo.len() > MOST {
            return Err("a pickle makes more values than any model has".into());
        }
        let code = input.byte()? as u8;
        let value = match code {
            b'.' => {
                let value = stack.pop().ok_or("a pickle of nothing")?;
                return Ok((value, bytes.len() - input.0.len()));
            }
            // The protocol, and frames, which are only for readers that read ahead.
            0x80 => {
                input.byte()?;
                continue;
            }
            0x95 => {
                input.long()?;
                continue;
            }
            b'(' => Value::Mark,
            b'N' => Value::None,
            0x88 => Value::Bool(true),
            0x89 => Value::Bool(false),
            b'J' => Value::Int(i32::from_le_bytes(input.array()?) as i64),
            b'K' => Value::Int(input.byte()? as i64),
            b'M' => Value::Int(u16::from_le_bytes(input.array()?) as i64),
            0x8a => {
                let len = input.byte()?;
                integer(input.take(len)?)?
            }
            0x8b => {
                let len = input.word()?;
                integer(input.take(len)?)?
            }
            b'G' => Value::Float(f64::from_be_bytes(input.array()?)),
            b'X' | b'T' | b'B' => {
                let len = input.word()?;
                bytes_or_text(heap, code, input.take(len)?)?
            }
            0x8c | b'U' | b'C' => {
                let len = input.byte()?;
                bytes_or_text(heap, code, input.take(len)?)?
            }
            0x8d | 0x8e => {
                let len = input.long()?;
                bytes_or_text(heap, if code == 0x8d { b'X' } else { b'B' }, input.take(len)?)?
            }
            b']' => heap.add(Node::List(Vec::new())),
            b'}' => heap.add(Node::Dict(Vec::new())),
            b')' => heap.add(Node::Tuple(Vec::new())),
            0x8f => heap.add(Node::List(Vec::new())),
            b't' | b'l' => {
                let items = marked(&mut stack)?;
                heap.add(if code == b't' { Node::Tuple(items) } else { Node::List(items) })
            }
            0x85..=0x87 => {
                let at = stack
                    .len()
                    .checked_sub((code - 0x84) as usize)
                    .ok_or("a pickle takes what is not there")?;
                let items = stack.split_off(at);
                heap.add(Node::Tuple(items))
            }
            b'd' => {
                let items = marked(&mut stack)?;
                heap.add(Node::Dict(pairs(&items)))
            }
            b'a' => {
                let item = pop(&mut stack)?;
                append(heap, &stack, &[item])?;
                continue;
            }
            b'e' | 0x90 => {
                let items = marked(&mut stack)?;
                append(heap, &stack, &items)?;
                continue;
            }
            b's' => {
                let (value, key) = (pop(&mut stack)?, pop(&mut stack)?);
                set(heap, &stack, &[key, value])?;
                continue;
            }
            b'u' => {
                let items = marked(&mut stack)?;
                set(heap, &stack, &items)?;
                continue;
            }
            b'0' => {
                pop(&mut stack)?;
                continue;
            }
            b'1' => {
                marked(&mut stack)?;
                continue;
            }
            b'2' => *stack.last().ok_or("a pickle takes what is not there")?,
            b'q' | b'r' | 0x94 => {
                let key = match code {
                    b'q' => input.byte()?,
                    b'r' => input.word()?,
                    _ => memo.len(),
                };
                memo.insert(key, *stack.last().ok_or("a pickle takes what is not there")?);
                continue;
            }
            b'h' | b'j' => {
                let key = if code == b'h' { input.byte()? } else { input.word()? };
                *memo.get(&key).ok_or("a pickle remembers what was never there")?
            }
            b'c' => {
                let (module, name) = (input.line()?, input.line()?);
                heap.add_global(module, name)
            }
            0x93 => {
                let (name, module) = (pop(&mut stack)?, pop(&mut stack)?);
                let short = |value| heap.text(value).filter(|text| text.len() < 1000).map(str::to_string);
                let (module, name) = short(module).zip(short(name)).ok_or("a class without a name")?;
                heap.add_global(&module, &name)
            }
            b'R' | 0x81 => {
                let (args, class) = (pop(&mut stack)?, pop(&mut stack)?);
                call(heap, class, args)
            }
            0x92 => {
                let (_, args, class) = (pop(&mut stack)?, pop(&mut stack)?, pop(&mut stack)?);
                call(heap, class, args)
            }
            b'b' => {
                let new = pop(&mut stack)?;
                if let Some(Value::Node(at)) = stack.last()
                    && let Some(Node::Object { state, .. }) = heap.nodes.get_mut(*at as usize)
                {
                    *state = new;
                }
                continue;
            }
            b'Q' => {
                let name = pop(&mut stack)?;
                heap.add(Node::Outside(name))
            }
            other => {
                return Err(format!("a pickle has the instruction {other:#04x}, which models do not have"));
            }
        };
        stack.push(value);
    }
}

fn bytes_or_text(heap: &mut Heap, code: u8, bytes: &[u8]) -> Result<Value, String> {
    match (code, heap.add_text(bytes)) {
        (_, Ok(text)) => Ok(text),
        // Bytes are no text, and nothing that is wanted.
        (b'B' | b'C' | b'T' | b'U', Err(_)) => Ok(Value::None),
        (_, Err(error)) => Err(error),
    }
}

fn pop(stack: &mut Vec<Value>) -> Result<Value, String> {
    stack.pop().ok_or_else(|| "a pickle takes what is not there".into())
}

/// What was pushed since the last mark.
fn marked(stack: &mut Vec<Value>) -> Result<Vec<Value>, String> {
    let at = stack.iter().rposition(|v| *v == Value::Mark).ok_or("a pickle takes what is not there")?;
    let items = stack.split_off(at + 1);
    stack.pop();
    Ok(items)
}

fn pairs(items: &[Value]) -> Vec<(Value, Value)> {
    items.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
}

fn append(heap: &mut Heap, stack: &[Value], items: &[Value]) -> Result<(), String> {
    let Some(Value::Node(at)) = stack.last() else {
        return Err("a pickle appends to what is no list".into());
    };
    match heap.nodes.get_mut(*at as usize) {
        Some(Node::List(list)) => list.extend_from_slice(items),
        // A list of a class of its own.
        Some(Node::Object { .. }) => {}
        _ => return Err("a pickle appends to what is no list".into()),
    }
    Ok(())
}

fn set(heap: &mut Heap, stack: &[Value], items: &[Value]) -> Result<(), String> {
    let Some(Value::Node(at)) = stack.last() else { return Err("a pickle puts into what is no dict".into()) };
    match heap.nodes.get_mut(*at as usize) {
        Some(Node::Dict(dict)) => dict.extend(pairs(items)),
        // A dict of a class of its own.
        Some(Node::Object { .. }) => {}
        _ => return Err("a pickle puts into what is no dict".into()),
    }
    Ok(())
}

fn call(heap: &mut Heap, class: Value, args: Value) -> Value {
    match heap.global(class) {
        // Empty, or made of a list of pairs.
        Some(("collections", "OrderedDict" | "defaultdict")) => {
            let items = heap.items(args).and_then(|args| heap.items(*args.first()?)).unwrap_or(&[]);
            let pairs = items.iter().filter_map(|pair| match heap.items(*pair)? {
                [key, value] => Some((*key, *value)),
                _ => None,
            });
            let pairs: Vec<_> = pairs.collect();
            heap.copied += pairs.len();
            heap.add(Node::Dict(pairs))
        }
        _ => heap.add(Node::Object { class, args, state: Value::None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(bytes: &[u8]) -> Result<(Heap, Value), String> {
        let mut heap = Heap::default();
        let (value, len) = read(bytes, &mut heap)?;
        assert_eq!(len, bytes.len());
        Ok((heap, value))
    }

    #[test]
    fn values_of_python_are_read() {
        // {'a': [1, 2.5, None, True], 'b': (-3, 2**40)} by protocol 2.
        let pickle =
            b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01G@\x04\x00\x00\x00\x00\x00\x00N\x88e\
            X\x01\x00\x00\x00bq\x03J\xfd\xff\xff\xff\x8a\x06\x00\x00\x00\x00\x00\x01\x86q\x04u.";
        let (heap, value) = read_all(pickle).unwrap();
        let Some(Node::Dict(pairs)) = heap.node(value) else { panic!("{value:?}") };
        assert_eq!(pairs.iter().map(|(key, _)| heap.text(*key).unwrap()).collect::<Vec<_>>(), ["a", "b"]);
        let list = heap.items(pairs[0].1).unwrap();
        assert_eq!(list, [Value::Int(1), Value::Float(2.5), Value::None, Value::Bool(true)]);
        assert_eq!(heap.items(pairs[1].1).unwrap(), [Value::Int(-3), Value::Int(1 << 40)]);
    }

    #[test]
    fn what_would_be_called_is_data() {
        // os.system('true') by protocol 2.
        let (heap, value) = read_all(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.").unwrap();
        let Some(Node::Object { class, .. }) = heap.node(value) else { panic!("{value:?}") };
        assert_eq!(heap.global(*class), Some(("os", "system")));
    }

    #[test]
    fn hostile_pickles_are_errors_and_cost_little() {
        // A million lists, each in the one before, and a list in itself.
        let deep = [&b"\x80\x02"[..], &b"]".repeat(1 << 20), &b"a".repeat((1 << 20) - 1), b"."].concat();
        assert!(read_all(&deep).is_ok());
        assert!(read_all(b"\x80\x02]q\x00h\x00a.").is_ok());
        // A dict of a list of many, again and again.
        let list = [&b"\x80\x02](K\x01K\x02\x86q\x00"[..], &b"h\x00".repeat(1 << 16), b"e\x85q\x01"].concat();
        let again = b"ccollections\nOrderedDict\nq\x02h\x01R0".to_vec();
        let copies = [list, again, b"h\x02h\x01R0".repeat(1 << 16), b"N.".to_vec()].concat();
        assert!(read_all(&copies).is_err());
        let many = [&b"\x80\x02"[..], &b"]".repeat(MOST + 9), b"."].concat();
        assert!(read_all(&many).is_err());
        for bad in [
            &b""[..],
            b"\x80\x02.",
            b"\x80\x02a.",
            b"\x80\x02]e.",
            b"\x80\x02K\x01K\x02a.",
            b"\x80\x02h\x07.",
            b"\x80\x02X\xff\xff\xff\xffabc.",
            b"\x80\x02\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc.",
            b"\x80\x02cos",
            b"\x80\x02\x93.",
            b"\x80\x02i.",
        ] {
            assert!(read_all(bad).is_err(), "{bad:?}");
        }
    }
}
