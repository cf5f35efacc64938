//! Layers over sequences by PyTorch's names: recurrent ones, attention, the transformer.

use super::attrs::{Attrs, Must};
use kiln_nn::*;
use kiln_tensor::{DType, Tensor};

/// The outputs of an operator; nothing if it is none of these.
pub(super) fn apply(op: &str, a: &Attrs, inputs: &[Tensor]) -> Result<Option<Vec<Tensor>>, String> {
    match op {
        "multi_head_attention" => multi_head_attention(a, inputs).map(Some),
        "transformer_encoder_layer" => encoder_layer(a, inputs).map(Some),
        "transformer_decoder_layer" => decoder_layer(a, inputs).map(Some),
        "lstm" | "gru" | "rnn" => recurrent(op, a, inputs).map(Some),
        _ => Ok(None),
    }
}

/// Queries, keys and values, then the weights; a mask may follow.
fn multi_head_attention(a: &Attrs, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
    let [x, y, in_weight, in_bias, out_weight, out_bias, rest @ ..] = inputs else {
        return Err(format!("{} inputs instead of 6", inputs.len()));
    };
    let heads = a.size("num_heads").must("num_heads")?;
    let mut layer = MultiHeadAttention::new(x.dim(-1), heads, &x.device());
    layer.in_proj_weight = Some(in_weight.clone());
    layer.in_proj_bias = Some(in_bias.clone());
    layer.out_proj = Linear { weight: out_weight.clone(), bias: Some(out_bias.clone()) };
    layer.causal = a.flag("causal")?.unwrap_or(false);
    // PyTorch's layer hides where a mask is true.
    let seen = |mask: &Tensor| if mask.dtype() == DType::Bool { mask.logical_not() } else { mask.clone() };
    let mask = rest.first().map(seen);
    let with = || match &mask {
        Some(mask) => Attend::new().mask(mask),
        None => Attend::new(),
    };
    match a.flag("need_weights")?.unwrap_or(false) {
        false => Ok(vec![layer.attend(x, y, y, with())]),
        true => {
            let (y, weights) = layer.attend_with_weights(x, y, y, with());
            let mean = a.flag("average_attn_weights")?.unwrap_or(true);
            Ok(vec![y, if mean { weights.mean(1) } else { weights }])
        }
    }
}

/// Settings that encoder and decoder layers share.
macro_rules! transformer {
    ($layer:ident, $a:ident, $x:ident) => {{
        let heads = $a.size("nhead").must("nhead")?;
        let width = $a.size("dim_feedforward")?.unwrap_or(2048);
        let layer = $layer::new($x.dim(-1), heads, &$x.device()).feedforward(width);
        let layer =
            layer.dropout($a.real("dropout")?.unwrap_or(0.0)).eps($a.real("layer_norm_eps")?.unwrap_or(1e-5));
        let layer = match $a.text("activation")?.unwrap_or("relu") {
            "relu" => layer,
            "gelu" => layer.activation(TransformerActivation::Gelu),
            word => return Err(format!("attribute `activation` is {word}")),
        };
        let layer = if $a.flag("norm_first")?.unwrap_or(false) { layer.norm_first() } else { layer };
        if $a.flag("bias")?.unwrap_or(true) { layer } else { layer.without_bias() }
    }};
}

fn encoder_layer(a: &Attrs, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
    let x = &inputs[0];
    let mut layer = transformer!(TransformerEncoderLayer, a, x);
    layer.self_attn.causal = a.flag("causal")?.unwrap_or(false);
    fill(&mut layer, &inputs[1..])?;
    let padding = padding(a, x)?;
    Ok(vec![layer.forward_with(x, attend(&padding))])
}

fn decoder_layer(a: &Attrs, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
    let [x, memory, rest @ ..] = inputs else { return Err("there is no memory".into()) };
    let mut layer = transformer!(TransformerDecoderLayer, a, x);
    layer.self_attn.causal = a.flag("causal")?.unwrap_or(false);
    fill(&mut layer, rest)?;
    let padding = padding(a, x)?;
    Ok(vec![layer.forward_with(x, memory, Memory { own: attend(&padding), memory: Attend::new() })])
}

/// What of `[batch, length, width]` is padding, where samples have lengths.
fn padding(a: &Attrs, x: &Tensor) -> Result<Option<Tensor>, String> {
    let Some(lengths) = lengths(a, x)? else { return Ok(None) };
    let places = Tensor::arange(0, x.dim(1) as i64, 1, &x.device());
    Ok(Some(places.ge(lengths.unsqueeze(1))))
}

fn attend(padding: &Option<Tensor>) -> Attend<'_> {
    match padding {
        Some(padding) => Attend::new().key_padding_mask(padding),
        None => Attend::new(),
    }
}

fn lengths(a: &Attrs, x: &Tensor) -> Result<Option<Tensor>, String> {
    let lengths = a.ints("lengths")?;
    Ok(lengths.map(|lengths| {
        let count = lengths.len();
        Tensor::from_vec(lengths.into_iter().map(|n| n as i64).collect(), [count], &x.device())
    }))
}

/// The sequence, `states` first states, then the parameters.
fn recurrent(op: &str, a: &Attrs, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
    let count = a.size("states")?.unwrap_or(0);
    let (x, rest) = inputs.split_first().ok_or("there is no input")?;
    let (states, parameters) = rest.split_at_checked(count).ok_or("states are missing")?;
    let lengths = lengths(a, x)?;
    let hidden = match parameters.get(1) {
        Some(weight) if weight.rank() == 2 => weight.dim(1),
        _ => return Err("there is no hidden weight".into()),
    };
    macro_rules! arranged {
        ($layer:expr) => {{
            let mut layer = $layer.layers(a.size("num_layers")?.unwrap_or(1));
            if a.flag("bidirectional")?.unwrap_or(false) {
                layer = layer.bidirectional();
            }
            if !a.flag("bias")?.unwrap_or(true) {
                layer = layer.without_bias();
            }
            if a.flag("batch_first")?.unwrap_or(true) {
                layer = layer.batch_first();
            }
            fill(&mut layer, parameters)?;
            layer
        }};
    }
    let (inputs, device) = (x.dim(-1), &x.device());
    match op {
        "lstm" => {
            let state = match states {
                [] => None,
                [h, c] => Some((h, c)),
                _ => return Err(format!("{count} states instead of 2")),
            };
            let (y, (h, c)) =
                arranged!(Lstm::new(inputs, hidden, device)).forward_with(x, state, lengths.as_ref());
            Ok(vec![y, h, c])
        }
        "gru" => {
            let layer = arranged!(Gru::new(inputs, hidden, device));
            Ok(<[Tensor; 2]>::from(layer.forward_with(x, states.first(), lengths.as_ref())).into())
        }
        _ => {
            let layer = Rnn::new(inputs, hidden, device);
            let layer = match a.text("nonlinearity")?.unwrap_or("tanh") {
                "tanh" => layer,
                "relu" => layer.relu(),
                word => return Err(format!("attribute `nonlinearity` is {word}")),
            };
            let layer = arranged!(layer);
            Ok(<[Tensor; 2]>::from(layer.forward_with(x, states.first(), lengths.as_ref())).into())
        }
    }
}

/// Gives a layer its parameters, in its own order, which is PyTorch's.
fn fill(layer: &mut dyn Module, parameters: &[Tensor]) -> Result<(), String> {
    let (mut given, mut missing) = (parameters.iter(), 0);
    layer.visit_mut("", &mut |_, parameter| match given.next() {
        Some(tensor) => *parameter = tensor.clone(),
        None => missing += 1,
    });
    match (missing, given.len()) {
        (0, 0) => Ok(()),
        (missing, left) => Err(format!("{missing} parameters are missing, {left} are left over")),
    }
}
